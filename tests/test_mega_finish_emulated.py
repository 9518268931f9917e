"""The finisher of the mega-kernel, thread by thread on a CPU: h and its scales, rows in the slots of their sources."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megamoe._host", reason="the host library is not built")

from helpers_emulated import NO_COMPILER, EmulatedRank, compile_emulated  # noqa: E402

from megamoe.config import MoESpec  # noqa: E402
from megamoe.kernels import mega_moe  # noqa: E402
from megamoe.kernels.formats import quantize_e4m3  # noqa: E402

pytestmark = NO_COMPILER
FACTS = np.dtype([("source", np.uint32), ("slot", np.uint32), ("weight", np.float32), ("scale", np.float32)])


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("emulated")

    @cache
    def get(instance: str) -> ctypes.CDLL:
        rows = mega_moe.INSTANCES[instance].block_rows
        defines = {"THREADS": 32, "BLOCK_ROWS": rows, "WIDE": str(instance == "wide").lower()}
        return compile_emulated(folder, "mega_finish.cpp", defines, ("places", "finish_l1", "finish_l2"))

    return get


def ranks_of(spec: MoESpec, instance: str, tokens: list[int]) -> list[EmulatedRank]:
    kind = mega_moe.INSTANCES[instance]
    limits = mega_moe.workspace_limits(spec, len(tokens), max(tokens))
    return [
        EmulatedRank(spec, limits, kind.tile(spec, 8, count), rank, count, 0.0) for rank, count in enumerate(tokens)
    ]


def address(array: Any) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


@pytest.mark.parametrize(
    ("instance", "rows"),
    [*(("decode", rows) for rows in (1, 7, 8, 9, 31, 33, 40)), *(("wide", rows) for rows in (1, 31, 33, 64, 127, 128))],
)
def test_h_is_quantised_as_formats_says(instance: str, rows: int, library: Any) -> None:
    """Random rows of many magnitudes, with NaN, infinity and nothing in them; what lies beside them stays."""
    block_rows = mega_moe.INSTANCES[instance].block_rows
    spec = MoESpec(hidden=512, intermediate=320, num_experts=4, top_k=2, activation="silu", weight_format="mxfp4")
    (rank,) = ranks_of(spec, instance, [64])
    bases = np.array([rank.base], np.uint64)
    rank.args.bases = bases.ctypes.data
    code = library(instance)
    found = (ctypes.c_uint64 * 3)()
    assert code.places(ctypes.byref(rank.args), found) is None
    random = np.random.default_rng(rows)
    values = random.standard_normal((block_rows, 128), np.float32)
    values *= 10.0 ** random.integers(-12, 12, (block_rows, 1)).astype(np.float32)
    values[0, 5], values[rows // 2, 7:9], values[rows - 1, 127] = np.nan, np.inf, -np.nan
    if rows > 4:
        values[1] = 0.0
        values[2] = np.nan
        values[3] = np.finfo(np.float32).tiny / 8
    result = np.full((block_rows, code.result_stride()), np.nan, np.float32)
    result[:, :128] = values
    wide, scales_of_a_row, row = 384, 3, block_rows * 2  # the third block of a ring
    before = rank.memory.copy()
    for index in (0, 2):
        given = (ctypes.byref(rank.args), address(result), index, row, rows, rows % 3)
        failure = code.finish_l1(*given)
        assert failure is None, failure
    expected, scale = quantize_e4m3(torch.from_numpy(values[:rows]), "block128")
    h = rank.view(found[0] + row * wide, np.uint8, (rows, 3, 128))
    scales = rank.view(found[1] + row * scales_of_a_row * 4, np.float32, (3, block_rows))
    for index in (0, 2):
        assert np.array_equal(h[:, index], expected.view(torch.uint8).numpy())
        assert np.array_equal(scales[index, :rows], scale[:, 0].numpy())
    # nothing else was written
    h[:, ::2] = 0xEE
    scales[::2, :rows].view(np.uint32)[:] = 0xEEEEEEEE
    assert np.array_equal(rank.memory, before)


@pytest.mark.parametrize(
    ("instance", "rows"),
    [*(("decode", rows) for rows in (1, 5, 32, 33, 40)), *(("wide", rows) for rows in (1, 33, 100, 128))],
)
def test_rows_go_to_the_slots_of_their_sources(instance: str, rows: int, library: Any) -> None:
    """Two ranks, hidden that ends in the middle of a task's columns."""
    block_rows = mega_moe.INSTANCES[instance].block_rows
    hidden, top_k, most = 320, 2, 70
    spec = MoESpec(
        hidden=hidden, intermediate=256, num_experts=4, top_k=top_k, activation="silu", weight_format="mxfp4"
    )
    ranks = ranks_of(spec, instance, [most, most - 1])
    bases = np.array([rank.base for rank in ranks], np.uint64)
    for rank in ranks:
        rank.args.bases = bases.ctypes.data
    code = library(instance)
    found = (ctypes.c_uint64 * 3)()
    assert code.places(ctypes.byref(ranks[1].args), found) is None
    random = np.random.default_rng(rows)
    facts = np.zeros(block_rows, FACTS)
    facts["source"] = random.integers(0, 2, block_rows)
    facts["slot"] = random.permutation((most - 1) * top_k)[:block_rows]
    results = random.integers(0, 1 << 32, (2, block_rows, code.result_stride()), dtype=np.uint32)
    expected = [rank.memory.copy() for rank in ranks]
    start = [rank.base - rank.memory.ctypes.data for rank in ranks]
    for index in (0, 1):
        own = ctypes.byref(ranks[1].args)
        given = (address(facts), address(results[index]), index, rows, rows % 3)
        lost = facts.copy()
        lost["source"] = 2**31  # of a call that is lost the facts may be of nothing: they must not be followed
        failure = code.finish_l2(own, True, address(lost), *given[1:]) or code.finish_l2(own, False, *given)
        assert failure is None, failure
        columns = min(256, hidden - index * 256)
        for i in range(rows):
            source, slot = int(facts["source"][i]), int(facts["slot"][i])
            at = start[source] + found[2] + ((slot % top_k) * most + slot // top_k) * hidden * 2 + index * 512
            expected[source][at : at + columns * 2] = results[index, i].view(np.uint8)[: columns * 2]
    for rank, memory in zip(ranks, expected, strict=True):
        assert np.array_equal(rank.memory, memory)
