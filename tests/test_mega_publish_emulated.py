"""Publish and pull of the mega-kernel, thread by thread on a CPU: lists, counts and headers; rows, scales and meta."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("megamoe._host", reason="the host library is not built")

from megamoe.config import MoESpec  # noqa: E402
from megamoe.kernels import mega_moe  # noqa: E402
from megamoe.kernels.jit.source import include_root  # noqa: E402

COMPILER = os.environ.get("CXX", "g++")
pytestmark = pytest.mark.skipif(shutil.which(COMPILER) is None, reason="no C++ compiler")
SOURCES = Path(__file__).with_name("emulate")
FORMS = ("one task", "one sorts", "two rounds")
PUBLISHED = 5 << 32 | 1  # control word: generation, kPublished
THREADS = {"decode": 512, "wide": 256, "prefill": 256}  # math threads


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("emulated")
    built: dict[tuple[int, str], ctypes.CDLL] = {}

    def get(threads: int, act_scale: str) -> ctypes.CDLL:
        key = (threads, act_scale)
        if key not in built:
            target = folder / f"publish_{threads}_{act_scale}.so"
            command = [
                COMPILER,
                "-std=c++20",
                "-O1",
                "-shared",
                "-fPIC",
                "-fno-strict-aliasing",
                "-w",
                f"-DTHREADS={threads}",
            ]
            command += ["-DMEGAMOE_BLOCK128"] if act_scale == "block128" else []
            command += [f"-I{SOURCES}", f"-I{include_root()}", str(SOURCES / "mega_publish.cpp"), "-o", str(target)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=200)
            assert done.returncode == 0, done.stderr[-4000:]
            built[key] = ctypes.CDLL(str(target))
            for name in ("describe", "publish_task", "pull_task"):
                getattr(built[key], name).restype = ctypes.c_char_p
        return built[key]

    return get


class Rank:
    """A rank's workspace and its tokens, with E4M3 rows and scales in place."""

    def __init__(
        self, spec: MoESpec, limits: tuple[int, ...], tile: tuple[int, ...], rank: int, tokens: int, holes: float
    ) -> None:
        random = np.random.default_rng(rank)
        shape = mega_moe.layer_shape(spec)
        self.numbers = mega_moe.load_host().layout_from_numbers(limits, shape, tile)
        self.memory = np.full(self.numbers["bytes"] + 64, 0xEE, np.uint8)
        self.base = -(-self.memory.ctypes.data // 64) * 64
        self.memory[: self.numbers["control_bytes"] + 64] = 0
        self.ids = random.integers(0, spec.num_experts, (tokens, spec.top_k))
        self.ids[random.random(self.ids.shape) < holes] = -1
        self.weights = random.random((tokens, spec.top_k), np.float32)
        self.rows = self.view(self.numbers["input"], np.uint8, (tokens, shape[4]))
        self.rows[:] = random.integers(0, 256, self.rows.shape)
        self.scales = self.view(self.numbers["scales"], np.uint32, (tokens, shape[5] // 4))
        self.scales[:] = random.integers(0, 1 << 32, self.scales.shape)
        self.args = mega_moe._Args()
        for name, values in (("limits", limits), ("shape", shape), ("tile", tile)):
            setattr(self.args, name, type(getattr(self.args, name))(*values))
        self.args.ids, self.args.weights, self.args.id_bytes = self.ids.ctypes.data, self.weights.ctypes.data, 8
        self.args.rank, self.args.num_tokens = rank, tokens
        self.args.num_local_experts = spec.num_experts // limits[0]

    def view(self, offset: int, dtype: Any, shape: tuple[int, ...]) -> Any:
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        start = self.base - self.memory.ctypes.data + offset
        return self.memory[start : start + size].view(dtype).reshape(shape)


@pytest.mark.parametrize("act_scale", mega_moe.ACT_SCALES)
@pytest.mark.parametrize(
    ("instance", "hidden", "experts", "top_k", "tokens", "holes", "form"),
    [
        ("decode", 4096, 32, 6, [1], 0, "one task"),
        ("decode", 512, 8, 2, [0, 9], 0.2, "one task"),
        ("decode", 544, 32, 6, [33, 40], 0.1, "one sorts"),
        ("decode", 288, 512, 8, [200], 0.3, "one sorts"),
        ("wide", 512, 16, 6, [300, 299], 0, "one sorts"),
        ("wide", 7168, 16, 16, [40, 60], 0, "one sorts"),
        ("prefill", 2880, 8, 2, [60, 50, 70, 80], 0, "one sorts"),
        ("prefill", 256, 8, 8, [500], 0.5, "one sorts"),
        ("prefill", 256, 32, 16, [400], 0.9, "two rounds"),
    ],
)
def test_what_is_published_is_pulled(
    instance: str,
    hidden: int,
    experts: int,
    top_k: int,
    tokens: list[int],
    holes: float,
    form: str,
    act_scale: str,
    library: Any,
) -> None:
    """Publish tasks in another order wherever none waits for another, threads in several orders."""
    spec = MoESpec(
        hidden=hidden, intermediate=256, num_experts=experts, top_k=top_k, activation="silu", weight_format="mxfp4",
        act_scale=act_scale,
    )  # fmt: skip
    kind, code = mega_moe.INSTANCES[instance], library(THREADS[instance], act_scale)
    limits = mega_moe.workspace_limits(spec, len(tokens), max(tokens) + 3)
    tiles = [kind.tile(spec, 8, count) for count in tokens]
    ring = limits[5]  # every row block has its place
    tiles = [(*tile[:1], 1, *tile[2:9], ring, ring) for tile in tiles]
    ranks = [Rank(spec, limits, tiles[0], rank, count, holes) for rank, count in enumerate(tokens)]
    bases = np.array([rank.base for rank in ranks], np.uint64)
    found = (ctypes.c_uint64 * 11)()
    for rank, tile in zip(ranks, tiles, strict=True):
        rank.args.bases = bases.ctypes.data
        rank.args.tile = type(rank.args.tile)(*tile)
        assert code.describe(ctypes.byref(rank.args), found) is None
        number, which = found[0], found[1]
        assert FORMS[which] == form or rank.args.num_tokens == 0
        order = list(range(number))
        if which == 1:
            np.random.default_rng(3).shuffle(order)
        for index in order:
            failure = code.publish_task(ctypes.byref(rank.args), index, index % 3)
            assert failure is None, failure
    _, _, lists, starts, counts, headers, arrived, ring1, ring1_scales, meta, unit_rows = found
    local, entry = experts // len(ranks), np.dtype([("slot", np.uint32), ("weight", np.float32)])
    rows_of: dict[int, list[tuple[int, int, float]]] = {
        expert: [] for expert in range(experts)
    }  # in the order of pulls
    for number, rank in enumerate(ranks):
        flat, begin = rank.ids.reshape(-1), 0
        for expert in range(experts):
            slots = np.flatnonzero(flat == expert)
            assert rank.view(starts, np.uint32, (experts,))[expert] == begin
            listed = rank.view(lists, entry, (begin + len(slots),))[begin:]
            assert np.array_equal(np.sort(listed["slot"]), slots)
            assert np.array_equal(listed["weight"], rank.weights.reshape(-1)[listed["slot"]])
            owner = ranks[expert // local]
            table = owner.view(counts, np.uint32, (len(ranks), limits[4]))
            assert table[number, expert % local] == len(slots)
            rows_of[expert] += [(number, int(slot), float(weight)) for slot, weight in listed]
            begin += len(slots)
        for owner in ranks:
            header = owner.view(headers, np.uint64, (len(ranks), 8))[number]
            assert header[0] == PUBLISHED and int(header[2]) & 0xFFFFFFFF == rank.args.num_tokens
    scales_of_a_row = -(-hidden // 128)
    for number, owner in enumerate(ranks):
        block = 0
        for expert in range(local):
            rows = rows_of[number * local + expert]
            for first in range(0, len(rows), kind.block_rows):
                here = rows[first : first + kind.block_rows]
                for part in range(kind.pulls_per_block):
                    given = (ctypes.byref(owner.args), expert, block, first, len(here), part, part % 3)
                    failure = code.pull_task(*given)
                    assert failure is None, failure
                    assert owner.view(arrived, np.uint32, (block + 1,))[block] == part + 1
                at = block * unit_rows
                got = owner.view(ring1 + at * owner.rows.shape[1], np.uint8, (len(here), owner.rows.shape[1]))
                known = owner.view(meta + at * 16, np.uint32, (len(here), 4))
                turned = owner.view(
                    ring1_scales + at * scales_of_a_row * 4, np.uint32, (scales_of_a_row, kind.block_rows)
                )
                for i, (source, slot, weight) in enumerate(here):
                    token = slot // top_k
                    assert np.array_equal(got[i, :hidden], ranks[source].rows[token, :hidden])
                    assert (known[i, 0], known[i, 1], known[i, 2:3].view(np.float32)[0]) == (
                        source,
                        slot,
                        np.float32(weight),
                    )
                    if act_scale == "token":
                        assert known[i, 3] == ranks[source].scales[token, 0]
                    else:
                        assert np.array_equal(turned[:, i], ranks[source].scales[token, :scales_of_a_row])
                block += 1


def test_the_threads_are_those_of_the_kernel() -> None:
    for name, instance in mega_moe.INSTANCES.items():
        assert dataclasses.asdict(instance)["threads"] - THREADS[name] in (128, 256)
