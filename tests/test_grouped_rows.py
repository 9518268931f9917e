"""The tiles that a CTA of the grouped GEMM finds: the device's own header, its threads played by the host's."""

from __future__ import annotations

import ctypes
import random
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
THREADS = (64, 96)  # of a CTA; two and three warps
TILE_ROWS = 128

# A barrier per warp and one per CTA are what lockstep and __syncthreads promise; nothing else is promised here either.
HARNESS = r"""
#include <barrier>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>
#define __device__
#define __forceinline__ inline
struct uint2 { uint32_t x, y; };
struct uint4 { uint32_t x, y, z, w; };
struct Dim { unsigned x; };
static thread_local Dim threadIdx;
static Dim blockDim, blockIdx, gridDim;
static std::unique_ptr<std::barrier<>> cta;
static std::vector<std::unique_ptr<std::barrier<>>> warps;
static std::vector<int> lanes;

static void __syncthreads() { cta->arrive_and_wait(); }
template <class F>
static auto exchange(int value, F take) {
    std::barrier<>& warp = *warps[threadIdx.x / 32];
    lanes[threadIdx.x] = value;
    warp.arrive_and_wait();
    const auto result = take(&lanes[threadIdx.x / 32 * 32], static_cast<int>(threadIdx.x % 32));
    warp.arrive_and_wait();
    return result;
}
static uint32_t __ballot_sync(unsigned, bool vote) {
    return exchange(vote, [](const int* v, int) {
        uint32_t mask = 0;
        for (int i = 0; i < 32; ++i) mask |= static_cast<uint32_t>(v[i] != 0) << i;
        return mask;
    });
}
static int __shfl_up_sync(unsigned, int value, int d) {
    return exchange(value, [d](const int* v, int lane) { return v[lane < d ? lane : lane - d]; });
}
static int __shfl_sync(unsigned, int value, int from) {
    return exchange(value, [from](const int* v, int) { return v[from]; });
}
static int __ffs(int v) { return __builtin_ffs(v); }
static int __ldg(const int* p) { return *p; }
#include "megamoe/impls/sm90_grouped_gemm_args.cuh"
using namespace megamoe::scheduler;

using Args = megamoe::impls::GroupedGemmArgs;
extern "C" const int offsets[] = {
    offsetof(Args, x), offsetof(Args, w), offsetof(Args, packed), offsetof(Args, w_scales), offsetof(Args, x_scales),
    offsetof(Args, d), offsetof(Args, d_stride), offsetof(Args, x_scales_stride), offsetof(Args, rows.row_groups),
    offsetof(Args, rows.counts), offsetof(Args, rows.num_groups), offsetof(Args, rows.max_rows), offsetof(Args, n),
    offsetof(Args, num_k_blocks), offsetof(Args, num_x_scales), sizeof(Args)};

// Fills `table` (3 * groups + 1) by `threads` threads.
extern "C" void build_table(const int* row_groups, const int* counts, int groups, int max_rows, int column_tiles,
                            int threads, int* table) {
    blockDim.x = threads;
    cta = std::make_unique<std::barrier<>>(threads);
    warps.clear();
    for (int i = 0; i < threads / 32; ++i) warps.push_back(std::make_unique<std::barrier<>>(32));
    lanes.assign(threads, 0);
    const GroupedRows rows{row_groups, counts, groups, max_rows};
    std::vector<std::thread> all;
    for (int i = 0; i < threads; ++i)
        all.emplace_back([&, i] {
            threadIdx.x = i;
            GroupedTiles<TILE_ROWS>::build(table, rows, column_tiles);
        });
    for (std::thread& thread : all) thread.join();
}

// Writes (group, column tile, first row, rows left) of the tiles of one CTA; returns their number.
extern "C" int walk(const int* table, int groups, int cta_index, int ctas, int* out) {
    blockIdx.x = cta_index;
    gridDim.x = ctas;
    const GroupedRows rows{nullptr, nullptr, groups, 0};
    int n = 0;
    for (GroupedTiles<TILE_ROWS> tiles(table, rows); tiles.valid(); tiles.advance(), ++n) {
        const Tile t = tiles.tile();
        const int fields[4] = {t.group, t.n, t.first_row, t.rows};
        for (int i = 0; i < 4; ++i) out[4 * n + i] = fields[i];
    }
    return n;
}
""".replace("TILE_ROWS", str(TILE_ROWS))


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ctypes.CDLL]:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++")
    folder = tmp_path_factory.mktemp("rows")
    source, target = folder / "rows.cpp", folder / "rows.so"
    source.write_text(HARNESS)
    include = ROOT / "kernels" / "include"
    command = [compiler, "-std=c++20", "-O1", "-Wall", "-pthread", "-shared", "-fPIC", f"-I{include}", str(source)]
    subprocess.run([*command, "-o", str(target)], check=True, timeout=120)
    yield ctypes.CDLL(str(target))


def test_the_host_writes_the_arguments_where_the_device_reads_them(library: ctypes.CDLL) -> None:
    """In the order in which helpers_gemm.py reads what the host wrote, and test_gemm_host.py checks it."""
    assert list((ctypes.c_int * 16).in_dll(library, "offsets")) == [
        *(0, 128, 256, 264, 272, 280),  # maps, pointers
        *(288, 296),  # strides
        *(304, 312, 320, 324),  # groups
        *(328, 332, 336, 384),
    ]


def table_of(library: ctypes.CDLL, groups: int, rows: int, columns: int, threads: int, *, indices=None, counts=None):
    table = (ctypes.c_int * (3 * groups + 1))(*[-77] * (3 * groups + 1))
    arrays = [None if v is None else (ctypes.c_int * max(1, len(v)))(*v) for v in (indices, counts)]
    library.build_table(*arrays, groups, rows, columns, threads, table)
    return list(table)


def check(library: ctypes.CDLL, table: list[int], expected: list[tuple[int, int]], columns: int) -> None:
    """`expected`: first row and count of each group."""
    groups = len(expected)
    counts = table[2 * groups + 1 :]
    assert counts == [count for _, count in expected]
    assert [f for f, c in zip(table[groups + 1 :], counts, strict=False) if c] == [f for f, c in expected if c]
    tiles = [-(-count // TILE_ROWS) * columns for count in counts]
    assert table[: groups + 1] == [sum(tiles[:g]) for g in range(groups + 1)]
    for ctas in (1, 5):
        seen: Counter[tuple[int, ...]] = Counter()
        out = (ctypes.c_int * (4 * sum(tiles) + 4))()
        array = (ctypes.c_int * len(table))(*table)
        for cta in range(ctas):
            number = library.walk(array, groups, cta, ctas, out)
            seen.update(tuple(out[4 * i : 4 * i + 4]) for i in range(number))
        wanted = Counter(
            (g, n, first + m, count - m)
            for g, (first, count) in enumerate(expected)
            for m in range(0, count, TILE_ROWS)
            for n in range(columns)
        )
        assert seen == wanted


def laid_out(sizes: list[int], order: list[int], gaps: list[int]) -> tuple[list[int], list[tuple[int, int]]]:
    """Return the indices of groups in an order with a gap behind each, and the first row and count of each group."""
    indices: list[int] = []
    expected = [(0, 0)] * len(sizes)
    for group, gap in zip(order, gaps, strict=True):
        expected[group] = (len(indices), sizes[group])
        indices += [group] * sizes[group] + [-1] * gap
    return indices, expected


CASES = {
    "uniform": ([1536] * 8, [0] * 8),
    "tail of no group": ([40, 0, 3], [0, 0, 10240]),
    "one row each": ([1] * 40, [0] * 40),
    "sizes around a segment": ([0, 1, 127, 128, 129, 130, 255, 256, 257], [0] * 9),
    "aligned to segments": ([256, 128, 384, 128], [0, 128, 0, 256]),
    "a gap within a segment": ([60, 60], [8, 128]),
    "a gap that both ends of a segment lie in": ([3, 5, 64], [130, 200, 300]),
    "one hot": ([0, 0, 5000, 0], [0] * 4),
    "all empty": ([0, 0, 0], [0] * 3),
    "only padding": ([0, 0], [500, 0]),
}


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("name", CASES)
def test_contiguous(library: ctypes.CDLL, name: str, threads: int) -> None:
    sizes, gaps = CASES[name]
    for order in (list(range(len(sizes))), list(reversed(range(len(sizes))))):
        indices, expected = laid_out(sizes, order, gaps)
        table = table_of(library, len(sizes), len(indices), 3, threads, indices=indices)
        check(library, table, expected, 3)


def test_contiguous_at_random(library: ctypes.CDLL) -> None:
    generator = random.Random(4)
    for _ in range(40):
        groups = generator.choice([1, 2, 31, 32, 33, 70])
        largest = generator.choice([2, 140, 500])
        sizes = [generator.choice([0, 1, generator.randrange(largest)]) for _ in range(groups)]
        gaps = [generator.choice([0, 0, generator.randrange(300)]) for _ in range(groups)]
        order = list(range(groups))
        generator.shuffle(order)
        indices, expected = laid_out(sizes, order, gaps)
        # what is no group may be any number outside
        indices = [generator.choice([-1, -(2**31), groups, 2**31 - 1]) if g < 0 else g for g in indices]
        table = table_of(library, groups, len(indices), 2, 64, indices=indices)
        check(library, table, expected, 2)


@pytest.mark.parametrize("counts", [[5, 0, 130, 300, -3], [0] * 40, [128] * 33])
def test_masked_counts_are_cut_to_the_padded_rows(library: ctypes.CDLL, counts: list[int]) -> None:
    table = table_of(library, len(counts), 256, 4, 64, counts=counts)
    check(library, table, [(g * 256, min(max(count, 0), 256)) for g, count in enumerate(counts)], 4)


def test_without_counts_all_rows_count(library: ctypes.CDLL) -> None:
    check(library, table_of(library, 3, 200, 2, 64), [(0, 200), (200, 200), (400, 200)], 2)
