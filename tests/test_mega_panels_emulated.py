"""Panels of the mega-kernel, thread by thread on a CPU: what math warps and loaders make of packed weights."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
host = pytest.importorskip("megamoe._host", reason="the host library is not built")

from helpers_emulated import NO_COMPILER, EmulatedRank, compile_emulated  # noqa: E402

from megamoe.config import MoESpec  # noqa: E402
from megamoe.kernels import mega_moe  # noqa: E402
from megamoe.kernels.formats import dequantize_mxfp4  # noqa: E402
from megamoe.kernels.packing.exponents import MAX_EXPONENT  # noqa: E402
from megamoe.kernels.packing.moe import gate_up_order, pack_moe_experts  # noqa: E402
from megamoe.kernels.packing.tiles import ss_row_order  # noqa: E402

pytestmark = NO_COMPILER
EXPERTS, ROWS, STEP, UNTOUCHED = 2, 256, 128, 0xEE
L1, L2, EXPAND = (host.PHASES.index(name) for name in ("l1", "l2", "expand"))


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("emulated")

    @cache
    def get(parts: int) -> ctypes.CDLL:
        defines = {"THREADS": mega_moe.INSTANCES["expanded"].threads, "MEGAMOE_EXPAND": parts}
        return compile_emulated(folder, "mega_panels.cpp", defines, ("places", "expand_tasks"))

    return get


def matrices(hidden: int, intermediate: int) -> tuple[Any, dict[int, Any]]:
    """Return packed experts, and by phase E4M3 bytes `[E, N, K]` of their rows in the order of the tiles."""
    random = torch.Generator().manual_seed(hidden)

    def draw(rows: int, columns: int) -> tuple[Any, Any]:
        codes = torch.randint(0, 256, (EXPERTS, rows, columns // 2), dtype=torch.uint8, generator=random)
        scales = torch.randint(0, MAX_EXPONENT + 1, (EXPERTS, rows, columns // 32), generator=random)
        first = torch.randint(100, 140, (EXPERTS, rows, 1), generator=random)
        return codes, (first + scales).to(torch.uint8)

    w13, w2 = draw(2 * intermediate, hidden), draw(hidden, intermediate)
    packed = pack_moe_experts(*w13, *w2, strict=True)
    order = gate_up_order(intermediate)
    rows13 = torch.where((order >= 0).unsqueeze(1), dequantize_mxfp4(*w13)[:, order.clamp(min=0)], 0.0)
    rows2 = torch.nn.functional.pad(dequantize_mxfp4(*w2), (0, 0, 0, -hidden % 128))
    found = {}
    for phase, rows, weight in ((L1, rows13, packed.w13), (L2, rows2, packed.w2)):
        whole = torch.nn.functional.pad(rows.double(), (0, -rows.shape[2] % STEP))
        exact = whole / weight.row_scale.double().unsqueeze(2)
        bytes_ = exact.float().to(torch.float8_e4m3fn)
        assert torch.equal(bytes_.double(), exact)
        of_tiles = torch.arange(0, rows.shape[1], 128).unsqueeze(1) + torch.tensor(ss_row_order())
        found[phase] = bytes_.view(torch.uint8)[:, of_tiles.flatten()].numpy()
    return packed, found


def swizzled(rows: Any) -> Any:
    """Return E4M3 rows `[n, K]` as K steps `[K / 128, n, 128]`, pieces of 16 bytes of row n at place xor n % 8."""
    steps = rows.reshape(len(rows), -1, 8, 16).swapaxes(0, 1)
    place = np.arange(8) ^ np.arange(len(rows))[:, None] % 8
    found = np.empty_like(steps)
    found[:, np.arange(len(rows))[:, None], place] = steps
    return found.reshape(len(steps), len(rows), STEP)


@pytest.mark.parametrize(
    ("hidden", "intermediate", "parts"),
    [
        (640, 256, 2),  # parts of 2 and 3 K steps, less than a slot; the third column block of W2 has one block
        (1408, 320, 2),  # 5 and 6, more than a slot
        (1024, 1152, 2),  # 4, one slot; whole column blocks
        (128, 640, 2),  # fewer K steps than parts; W2 has one block alone
        (1056, 96, 3),  # K ends in the middle of a step, and rows of W2 in the middle of a block
        (256, 128, 1),
    ],
)
def test_panels_hold_the_weights(hidden: int, intermediate: int, parts: int, library: Any) -> None:
    """All tasks of a schedule that expand, in three orders of threads; what lies beside the weights stays."""
    spec = MoESpec(
        hidden=hidden,
        intermediate=intermediate,
        num_experts=EXPERTS,
        top_k=1,
        activation="silu",
        weight_format="mxfp4",
    )
    packed, expected = matrices(hidden, intermediate)
    kind, code = mega_moe.INSTANCES["expanded"], library(parts)
    limits = mega_moe.workspace_limits(spec, 1, 200)
    tile = kind.tile(spec, 200, 200)
    rank = EmulatedRank(spec, limits, tile, 0, 200, 0.0)
    bases = np.array([rank.base], np.uint64)
    rank.args.bases = bases.ctypes.data
    rank.args.w13, rank.args.w2 = packed.w13.data.data_ptr(), packed.w2.data.data_ptr()
    tasks = expand_tasks(hidden, intermediate, parts)
    slots = 1 + max(task["panel"] for task in tasks)
    depth = max(rows.shape[2] for rows in expected.values()) // STEP
    wanted = np.full((slots + 4, depth, ROWS, STEP), UNTOUCHED, np.uint8)  # and a slot of the ring more
    arrived = np.zeros(slots, np.uint32)
    for task in tasks:
        if task["weights"] not in expected:
            continue
        rows = expected[task["weights"]][task["expert"], task["index"] * ROWS :][:ROWS]
        assert task["part"] == arrived[task["panel"]]
        arrived[task["panel"]] += 1
        wanted[task["panel"], : rows.shape[1] // STEP, : len(rows)] = swizzled(rows)
    assert (arrived == parts).all()
    words = np.array([[task[name] for name in ("weights", "expert", "index", "panel", "part")] for task in tasks])
    words = words.astype(np.uint32)
    memory = np.empty(wanted.nbytes + 16, np.uint8)
    panels = memory[-memory.ctypes.data % 16 :][: wanted.nbytes].reshape(wanted.shape)
    rank.args.panels = panels.ctypes.data
    found = (ctypes.c_uint64 * 2)()
    assert code.places(ctypes.byref(rank.args), found) is None
    before = rank.memory.copy()
    counters = rank.view(found[0], np.uint32, (slots,))
    for seed in range(3):
        panels[:] = UNTOUCHED
        failure = code.expand_tasks(ctypes.byref(rank.args), ctypes.c_void_p(words.ctypes.data), len(words), seed)
        assert failure is None, failure
        assert np.array_equal(panels, wanted)
        assert (counters == parts).all()
        counters[:] = 0
        assert np.array_equal(rank.memory, before)


def expand_tasks(hidden: int, intermediate: int, parts: int) -> list[dict[str, Any]]:
    """Return those tasks of a schedule that expand, also those beyond the last panel; every panel has its own slot."""
    tile = host.TileShape()
    tile.block_rows, tile.unit_blocks, tile.l1_columns, tile.l2_columns = 128, 16, 128, 256
    tile.pulls_per_block, tile.publish_rows, tile.combine_rows, tile.group, tile.lag = 4, 8, 8, 1, 1
    tiles = (-(-intermediate // 128), -(-hidden // 256))
    tile.ring1_units = host.min_ring1_units(tile.group)
    tile.ring2_units = host.min_ring2_units(tile.lag, tile.group, 4, tiles[0])
    panels = EXPERTS * sum(tiles)
    schedule = host.Schedule([128] * EXPERTS, *tiles, 1, 1, tile, 4, parts, 1, max(panels, 2))
    tasks = [schedule.task(ticket) for ticket in range(schedule.num_tickets)]
    return [task for task in tasks if task["phase"] == EXPAND]
