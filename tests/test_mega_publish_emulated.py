"""Publish and pull of the mega-kernel, thread by thread on a CPU: lists, counts and headers; rows, scales and meta."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Iterator
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
FORMS = ("one task", "one sorts", "two rounds")
PUBLISHED = 5 << 32 | 1  # control word: generation, kPublished
SUMMED, LOST, LATE = range(3)  # ends of a schedule
TIMEOUT, SHAPE = 1, 3  # faults
ENTRY = np.dtype([("slot", np.uint32), ("weight", np.float32)])  # of a list
THREADS = {"decode": 512, "wide": 256, "prefill": 256, "expanded": 256}  # math threads


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("emulated")

    @cache
    def get(threads: int, act_scale: str, expands: bool) -> ctypes.CDLL:
        defines = {"THREADS": threads} | ({"MEGAMOE_BLOCK128": 1} if act_scale == "block128" else {})
        defines |= {"MEGAMOE_EXPAND": 2} if expands else {}
        return compile_emulated(
            folder,
            "mega_publish.cpp",
            defines,
            ("describe", "publish_task", "pull_task", "pull_by_copies", "schedule"),
        )

    return get


@pytest.mark.parametrize("act_scale", mega_moe.ACT_SCALES)
@pytest.mark.parametrize(
    ("instance", "hidden", "experts", "top_k", "tokens", "holes", "form"),
    [
        ("decode", 4096, 32, 6, [1], 0, "one task"),
        ("decode", 512, 8, 2, [0, 2], 0.2, "one task"),
        ("wide", 544, 16, 16, [2, 1], 0.2, "one task"),
        ("decode", 512, 8, 2, [3, 9], 0.2, "one sorts"),
        ("decode", 544, 32, 6, [33, 40], 0.1, "one sorts"),
        ("decode", 288, 512, 8, [200], 0.3, "one sorts"),
        ("wide", 512, 16, 6, [300, 299], 0, "one sorts"),
        ("wide", 7168, 16, 16, [40, 60], 0, "one sorts"),
        ("prefill", 2880, 8, 2, [60, 50, 70, 80], 0, "one sorts"),
        ("prefill", 256, 8, 8, [500], 0.5, "one sorts"),
        ("prefill", 256, 32, 16, [400], 0.9, "two rounds"),
        ("expanded", 2880, 4, 2, [150, 140], 0.1, "one sorts"),
        ("expanded", 256, 8, 8, [600], 0.2, "two rounds"),
        ("expanded", 7168, 16, 2, [150, 90], 0, "one sorts"),
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
    """Publish tasks in another order wherever none waits for another, threads in several orders; pulls in both ways."""
    spec = MoESpec(
        hidden=hidden, intermediate=256, num_experts=experts, top_k=top_k, activation="silu", weight_format="mxfp4",
        act_scale=act_scale,
    )  # fmt: skip
    kind, code = mega_moe.INSTANCES[instance], library(THREADS[instance], act_scale, instance == "expanded")
    limits = mega_moe.workspace_limits(spec, len(tokens), max(tokens) + 3)
    tiles = [kind.tile(spec, 8, count) for count in tokens]
    ring = limits[5]  # every row block has its place
    tiles = [(*tile[:1], 1, *tile[2:9], ring, ring) for tile in tiles]
    ranks = [EmulatedRank(spec, limits, tiles[0], rank, count, holes) for rank, count in enumerate(tokens)]
    bases = np.array([rank.base for rank in ranks], np.uint64)
    found = (ctypes.c_uint64 * 10)()
    for rank, tile in zip(ranks, tiles, strict=True):
        rank.args.bases = bases.ctypes.data
        rank.args.lay_out(limits, mega_moe.layer_shape(spec), tile)
        assert code.describe(ctypes.byref(rank.args), 0, found) is None
        number, which = found[0], found[1]
        assert FORMS[which] == form or rank.args.num_tokens == 0
        order = list(range(number))
        if which == 1:
            np.random.default_rng(3).shuffle(order)
        for index in order:
            failure = code.publish_task(ctypes.byref(rank.args), 0, index, index % 3)
            assert failure is None, failure
    _, _, lists, counts, headers, arrived, ring1, ring1_scales, meta, unit_rows = found
    local = experts // len(ranks)
    rows_of: dict[int, list[tuple[int, int, float]]] = {
        expert: [] for expert in range(experts)
    }  # in the order of pulls
    for number, rank in enumerate(ranks):
        begin = 0
        for expert in range(experts):
            listed = entries_of(rank, lists, begin, expert, rank.ids, rank.weights)
            owner = ranks[expert // local]
            table = owner.view(counts, np.uint32, (len(ranks), limits[4], 2))
            assert tuple(table[number, expert % local]) == (len(listed), begin)
            rows_of[expert] += [(number, int(slot), float(weight)) for slot, weight in listed]
            begin += len(listed)
        for owner in ranks:
            header = owner.view(headers, np.uint64, (len(ranks), 8))[number]
            assert header[0] == PUBLISHED and int(header[2]) & 0xFFFFFFFF == rank.args.num_tokens
    for number, owner in enumerate(ranks):
        ended, sums = scheduled(code, owner, local, number)
        assert ended == [SUMMED, 1, 0, 0]
        rows = np.array([len(rows_of[number * local + expert]) for expert in range(local)])
        firsts = np.append(0, np.cumsum(-(-rows // kind.block_rows)))  # a unit is a row block
        assert sums == [*rows, *firsts, *firsts]
    scales_of_a_row = -(-hidden // 128)
    for number, owner in enumerate(ranks):
        block = 0
        for expert in range(local):
            rows = rows_of[number * local + expert]
            for first in range(0, len(rows), kind.block_rows):
                here = rows[first : first + kind.block_rows]
                parts = kind.pulls_per_block
                for part in range(parts if block % 2 else 0):  # by the math warps
                    given = (ctypes.byref(owner.args), expert, block, first, len(here), part, part % 3)
                    failure = code.pull_task(*given)
                    assert failure is None, failure
                    assert owner.view(arrived, np.uint32, (block + 1,))[block] == part + 1
                if block % 2 == 0:
                    given = (ctypes.byref(owner.args), expert, block, first, len(here), parts, block % 3)
                    failure = code.pull_by_copies(*given)
                    assert failure is None, failure
                    assert owner.view(arrived, np.uint32, (block + 1,))[block] == parts
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


def entries_of(rank: EmulatedRank, lists: int, begin: int, expert: int, ids: Any, weights: Any) -> Any:
    """Return an expert's entries in the list of a rank, which must be all choices of it in `ids [n, k]`, each once."""
    slots = np.flatnonzero(ids.reshape(-1) == expert)
    listed = rank.view(lists, ENTRY, (begin + len(slots),))[begin:]
    assert np.array_equal(np.sort(listed["slot"]), slots)
    assert np.array_equal(listed["weight"], weights.reshape(-1)[listed["slot"]])
    return listed


@pytest.mark.parametrize(("chunk", "dtype"), [(1, np.int32), (2, np.int64)])
@pytest.mark.parametrize(
    ("instance", "experts", "top_k", "bound", "form"),
    [
        ("decode", 8, 2, 2, "one task"),
        ("decode", 32, 6, 100, "one sorts"),
        ("prefill", 32, 16, 400, "two rounds"),
    ],
)
def test_a_later_chunk_is_of_later_tokens(
    instance: str, experts: int, top_k: int, bound: int, form: str, chunk: int, dtype: Any, library: Any
) -> None:
    """A whole chunk in the middle and the last one, a token short: choices, weights and x are those of its tokens."""
    hidden, tokens = 256, 3 * bound - 1
    spec = MoESpec(
        hidden=hidden, intermediate=256, num_experts=experts, top_k=top_k, activation="silu", weight_format="mxfp4"
    )
    kind, code = mega_moe.INSTANCES[instance], library(THREADS[instance], "token", False)
    limits = mega_moe.workspace_limits(spec, 1, bound)
    rank = EmulatedRank(spec, limits, kind.tile(spec, 8, bound), 0, bound, 0)
    random = np.random.default_rng(chunk)
    ids = random.integers(-1, experts, (tokens, top_k), dtype)
    weights = random.random((tokens, top_k), np.float32)
    x = torch.randn((tokens, hidden), generator=torch.Generator().manual_seed(chunk)).bfloat16()
    bases = np.array([rank.base], np.uint64)
    rank.args.bases, rank.args.num_tokens = bases.ctypes.data, tokens
    rank.args.ids, rank.args.weights, rank.args.x = ids.ctypes.data, weights.ctypes.data, x.data_ptr()
    rank.args.id_bytes = ids.itemsize
    found = (ctypes.c_uint64 * 10)()
    assert code.describe(ctypes.byref(rank.args), chunk, found) is None
    number, which, lists, counts, headers = found[:5]
    assert FORMS[which] == form
    before = rank.rows.copy()
    for index in range(number):
        failure = code.publish_task(ctypes.byref(rank.args), chunk, index, index % 3)
        assert failure is None, failure
    here = slice(chunk * bound, min((chunk + 1) * bound, tokens))
    own, begin = here.stop - here.start, 0
    for expert in range(experts):
        listed = entries_of(rank, lists, begin, expert, ids[here], weights[here])
        assert tuple(rank.view(counts, np.uint32, (experts, 2))[expert]) == (len(listed), begin)
        begin += len(listed)
    assert list(rank.view(headers, np.uint32, (16,))[4:7]) == [own, tokens, 3]
    expected, scale = quantize_e4m3(x[here], "token")
    assert np.array_equal(rank.rows[:own, :hidden], expected.view(torch.uint8).numpy())
    assert np.array_equal(rank.scales[:own, 0].view(np.float32), scale.numpy().reshape(-1))
    assert np.array_equal(rank.rows[own:], before[own:])


def scheduled(code: Any, owner: EmulatedRank, local: int, seed: int) -> tuple[list[int], list[int]]:
    """Return how a schedule of a rank ended, and what it sums."""
    found, sums = (ctypes.c_uint32 * 5)(), (ctypes.c_uint32 * (3 * local + 2))()
    failure = code.schedule(ctypes.byref(owner.args), found, sums, seed)
    assert failure is None, failure
    return list(found[:4]) + ([found[4]] if found[3] else []), list(sums)


def publish(code: Any, rank: EmulatedRank) -> None:
    failure = code.publish_task(ctypes.byref(rank.args), 0, 0, 1)
    assert failure is None, failure


def header_of(code: Any, owner: EmulatedRank, num_ranks: int, source: int) -> Any:
    """Return what a source told a rank: words of flag, hash, tokens of the chunk, of the call, chunks."""
    found = (ctypes.c_uint64 * 10)()
    assert code.describe(ctypes.byref(owner.args), 0, found) is None
    return owner.view(found[4], np.uint32, (num_ranks, 16))[source]


@pytest.fixture
def ranks(num_ranks: int) -> Iterator[list[EmulatedRank]]:
    """Ranks with a token each, of one layer, which refuse calls above the bound of two tokens."""
    spec = MoESpec(
        hidden=256, intermediate=256, num_experts=2 * num_ranks, top_k=2, activation="silu", weight_format="mxfp4"
    )
    limits = mega_moe.workspace_limits(spec, num_ranks, 2)
    tile = mega_moe.INSTANCES["decode"].tile(spec, 8, 1)
    made = [EmulatedRank(spec, limits, tile, rank, 1, 0) for rank in range(num_ranks)]
    bases = np.array([rank.base for rank in made], np.uint64)
    for rank in made:
        rank.args.bases, rank.args.shape_hash, rank.args.refuses = bases.ctypes.data, 7, 1
    yield made
    del bases  # the ranks point to it until here


@pytest.mark.parametrize("num_ranks", [1, 3, 35])  # more than a warp has lanes, too
def test_a_schedule_looks_at_every_header(num_ranks: int, ranks: list[EmulatedRank], library: Any) -> None:
    """Another layer is told before a rank that is missing, the last one here; more than the bound, and chunks."""
    code = library(THREADS["decode"], "token", False)
    own, last = ranks[0], ranks[-1]
    for rank in ranks[:-1]:
        publish(code, rank)
    assert scheduled(code, own, 2, 1)[0] == [LOST, 1, 0, TIMEOUT, num_ranks - 1]
    if num_ranks > 1:
        other = ranks[num_ranks // 2]
        other.args.shape_hash = 8
        publish(code, other)
        assert scheduled(code, own, 2, 1)[0] == [LOST, 1, 0, SHAPE, num_ranks // 2]
        other.args.shape_hash = 7
        publish(code, other)
    publish(code, last)
    assert scheduled(code, own, 2, 1)[0] == [SUMMED, 1, 0, 0]
    header = header_of(code, own, num_ranks, num_ranks - 1)
    header[5:7] = 6, 3
    assert scheduled(code, own, 2, 1)[0] == [SUMMED, 3, num_ranks if num_ranks > 1 else 0, 0]
    own.args.refuses = 0
    assert scheduled(code, own, 2, 1)[0] == [SUMMED, 3, 0, 0]
    header[2] = 9
    assert scheduled(code, own, 2, 1)[0][3:] == [SHAPE, num_ranks - 1]


@pytest.mark.parametrize("num_ranks", [1, 3, 35])
def test_a_late_cta_finds_its_chunk_over(num_ranks: int, ranks: list[EmulatedRank], library: Any) -> None:
    """Its rank is at a later chunk: headers missing or of another layer are no fault, and sums count for nothing."""
    code = library(THREADS["decode"], "token", False)
    own = ranks[0]
    word = own.view(own.numbers["generation"], np.uint64, (1,))

    def ends() -> list[list[int]]:
        """Return how a schedule ends, while the chunk is at work and when it is over, two of them later."""
        found = []
        for chunk in (0, 2):
            word[0] = chunk << 32 | (5 + chunk)
            found.append(scheduled(code, own, 2, 1)[0])
        return found

    for rank in ranks[:-1]:
        publish(code, rank)
    assert ends() == [[LOST, 1, 0, TIMEOUT, num_ranks - 1], [LATE, 1, 0, 0]]
    publish(code, ranks[-1])
    header = header_of(code, own, num_ranks, num_ranks - 1)
    header[2] = 8
    assert ends() == [[LOST, 1, 0, SHAPE, num_ranks - 1], [LATE, 1, 0, 0]]
    header[2], header[6] = 7, 3
    assert ends() == [[SUMMED, 3, 0, 0], [LATE, 3, 0, 0]]


def test_the_threads_are_those_of_the_kernel() -> None:
    for name, instance in mega_moe.INSTANCES.items():
        assert dataclasses.asdict(instance)["threads"] - THREADS[name] in (128, 256)
