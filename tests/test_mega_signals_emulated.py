"""The start of a CTA of the mega-kernel and signals of tiles, thread by thread on a CPU: none of a lost call."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("megamoe._host", reason="the host library is not built")

from helpers_emulated import NO_COMPILER, EmulatedRank, compile_emulated  # noqa: E402

from megamoe.config import MoESpec  # noqa: E402
from megamoe.kernels import mega_moe  # noqa: E402

pytestmark = NO_COMPILER
READY = 5 << 32 | 1  # control word: generation, kSlotReady
TOP_K, TOKENS, ROWS = 3, 50, 40
SPEC = MoESpec(hidden=768, intermediate=256, num_experts=4, top_k=TOP_K, activation="silu", weight_format="mxfp4")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("emulated")
    return compile_emulated(folder, "mega_signals.cpp", {"THREADS": 32}, ("places", "signal"))


@pytest.mark.parametrize("given_up", [False, True])
@pytest.mark.parametrize("second", [False, True])
def test_tiles_are_counted_and_the_last_one_tags(second: bool, given_up: bool, library: Any) -> None:
    """Two ranks; all tiles of a row block. A CTA that has stopped waiting says nothing: its tiles may hold anything."""
    kind = mega_moe.INSTANCES["decode"]
    limits = mega_moe.workspace_limits(SPEC, 2, TOKENS)
    ranks = [EmulatedRank(SPEC, limits, kind.tile(SPEC, 8, TOKENS), rank, TOKENS, 0.0) for rank in range(2)]
    bases = np.array([rank.base for rank in ranks], np.uint64)
    for rank in ranks:
        rank.args.bases = bases.ctypes.data
    own = ranks[1]
    found = (ctypes.c_uint64 * 6)()
    assert library.places(ctypes.byref(own.args), found) is None
    l1_done, l2_done, unit_l1_done, unit_l2_done, tags, meta = found
    block, unit, meta_row = 5, 2, 120
    random = np.random.default_rng(1)
    known = own.view(meta + meta_row * 16, np.uint32, (ROWS, 4))
    known[:, 0] = random.integers(0, 2, ROWS)
    known[:, 1] = random.permutation(TOKENS * TOP_K)[:ROWS]
    expected = [rank.memory.copy() for rank in ranks]
    start = [rank.base - rank.memory.ctypes.data for rank in ranks]
    tiles = SPEC.hidden // kind.l2_columns if second else 2
    for tile in range(tiles):
        failure = library.signal(ctypes.byref(own.args), second, given_up, block, unit, meta_row, ROWS, tile)
        assert failure is None, failure
        if given_up:
            continue
        for offset, index in (
            ((l2_done, block), (unit_l2_done, unit)) if second else ((l1_done, block), (unit_l1_done, unit))
        ):
            at = start[1] + offset + index * 4
            expected[1][at : at + 4].view(np.uint32)[0] += 1
        if second and tile + 1 == tiles:
            for source, slot in known[:, :2]:
                at = start[source] + tags + int(slot) * 8
                expected[source][at : at + 8].view(np.uint64)[0] = READY
    for rank, memory in zip(ranks, expected, strict=True):
        assert np.array_equal(rank.memory, memory)


@pytest.mark.parametrize(("word", "told"), [(0, 0), (7, 0), (2 << 32 | 7, 0), (9, 1 << 31)])
def test_a_cta_starts_where_its_rank_is(word: int, told: int, tmp_path: Path) -> None:
    """A first call, a later one, a CTA that comes when two chunks are over, and a rank that has given up."""
    library = compile_emulated(tmp_path, "mega_signals.cpp", {"THREADS": 128}, ("start",))
    bound = 20
    limits = mega_moe.workspace_limits(SPEC, 2, bound)
    ranks = [
        EmulatedRank(SPEC, limits, mega_moe.INSTANCES["decode"].tile(SPEC, 8, bound), rank, TOKENS, 0)
        for rank in (0, 1)
    ]
    bases = np.array([rank.base for rank in ranks], np.uint64)
    own = ranks[1]
    own.args.bases = bases.ctypes.data
    own.view(own.numbers["generation"], np.uint64, (1,))[0] = word
    own.view(own.numbers["aborts"], np.uint64, (2,))[1] = told
    found = (ctypes.c_uint64 * 9)()
    for seed in range(3):
        failure = library.start(ctypes.byref(own.args), 5, found, seed)
        assert failure is None, failure
        generation, chunk = max(word & 0xFFFFFFFF, 1), word >> 32
        first = chunk * bound
        barriers = 5 * 2 + 3
        assert list(found) == [
            own.base,
            1,
            generation,
            chunk,
            first,
            min(bound, TOKENS - first),
            told != 0,
            barriers,
            1,
        ]
