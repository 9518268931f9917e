"""The grouped GEMM against the products of the dequantised operands in FP64, on the CPU and, marked gpu, on a GPU.

Cases with a number: C16 (rows of no group, ragged groups), C17 (strides), C23 (all positive) are here; C10 (decoding)
is in test_packing.py, C18 and C19 (the shared cache, its key) in test_jit.py. C15, odd tiles of a GEMM that is grouped
along K, comes with that GEMM.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from itertools import product

import pytest

torch = pytest.importorskip("torch")

from helpers_grouped import (  # noqa: E402
    E4M3,
    GRANULARITIES,
    GROUPS,
    KINDS,
    LIMIT,
    POSITIVE_LIMIT,
    SPREADS,
    Weights,
    activations,
    check,
    indices,
    poison,
    run_contiguous,
    run_masked,
    sizes,
    values,
)

from megamoe.kernels import formats, gemm  # noqa: E402
from megamoe.kernels.gemm_instances import all_sources  # noqa: E402
from megamoe.kernels.jit import kernel as jit_kernel  # noqa: E402
from megamoe.kernels.quantize import quantize_sources  # noqa: E402

Tensor = torch.Tensor
ROWS = (0, 1, 7, 64, 127, 128, 129, 1000)
SIZES = (128, 320, 2880, 4096, 7168)  # N and K
DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))


@functools.lru_cache(maxsize=1)
def gpu_weights(kind: str, n: int, k: int) -> Weights:
    return Weights(kind, GROUPS, n, k, "cuda")


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("kind", KINDS)
def test_cpu_multiplies_the_dequantised_operands(kind: str, granularity: str) -> None:
    weights = Weights(kind, GROUPS, 96, 160, "cpu")
    for counts in ([3, 0, 5, 1], [0, 0, 9, 0], [0, 0, 0, 0]):
        run_contiguous(weights, counts, 2, granularity, "cpu")
        run_masked(weights, counts, granularity, "cpu")


@pytest.mark.parametrize("kind", KINDS)
def test_cpu_dense_is_the_case_of_one_group(kind: str) -> None:
    weights = Weights(kind, 1, 64, 128, "cpu")
    lhs = activations((5, 128), "token", "cpu")
    out, same = poison(5, 64, device="cpu"), poison(5, 64, device="cpu")
    weights.contiguous(lhs, weights.packed, same, torch.zeros(5, dtype=torch.int32))
    weights.dense(lhs, weights.one, out)
    assert torch.equal(out, same) and not bool(out.isnan().any())


def test_row_inner_scales_keep_their_values() -> None:
    for shape in ((7, 3), (2, 5, 4), (8, 1)):
        scales = torch.rand(shape)
        inner = gemm.get_mn_major_tma_aligned_tensor(scales)
        assert torch.equal(inner, scales) and inner.stride(-2) == 1 and inner.stride(-1) % 4 == 0
        assert gemm.get_mn_major_tma_aligned_tensor(inner) is inner


def test_num_sms() -> None:
    with pytest.raises(ValueError, match="num_sms"):
        gemm.set_num_sms(0)
    gemm.set_num_sms(7)
    assert gemm.get_num_sms() == 7
    gemm.set_num_sms(None)


# --- the grid: every N, K, kind and granularity, with a quarter of the rows and spreads ---


def sample(n: int, k: int, granularity: str) -> list[tuple[str, int]]:
    """Return the (spread, rows) that a pair of N and K is tried with: two row counts of the eight for each spread.

    Neighbouring pairs get other row counts, so that every spread meets all of them with every N and every K.
    """
    place = SIZES.index(n) + 2 * SIZES.index(k) + GRANULARITIES.index(granularity)
    return [(spread, ROWS[(place + i + 4 * half) % 8]) for i, spread in enumerate(SPREADS) for half in (0, 1)]


def test_the_sample_meets_every_pair() -> None:
    every = set(product(SPREADS, ROWS))
    tried = {key: sample(*key) for key in product(SIZES, SIZES, GRANULARITIES)}
    for granularity in GRANULARITIES:
        assert {pair for key, pairs in tried.items() if key[2] == granularity for pair in pairs} == every
    for size in SIZES:
        for axis in (0, 1):
            pairs = [set(pairs) for key, pairs in tried.items() if key[axis] == size]
            assert set().union(*pairs) == every, (size, axis)


@pytest.mark.gpu
@pytest.mark.parametrize("k", SIZES)
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_grid_on_the_gpu(kind: str, n: int, k: int) -> None:
    weights = gpu_weights(kind, n, k)
    for granularity in GRANULARITIES:
        chosen = sample(n, k, granularity)
        for i, (spread, rows) in enumerate(chosen):
            run_contiguous(weights, sizes(spread, rows), i % 3, granularity, "cuda")
        for spread, rows in (chosen[2], chosen[7]):
            run_masked(weights, sizes(spread, rows), granularity, "cuda")


# --- numbered cases ---


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("kind", KINDS)
def test_c16_tail_of_no_group(kind: str, granularity: str, device: str) -> None:
    weights = Weights(kind, GROUPS, 128, 256, device)
    groups = torch.cat([indices([7, 0, 130, 1], 0, device), torch.full((10240,), -1, device=device).int()])
    lhs = activations((len(groups), 256), granularity, device)
    out = poison(len(groups), 128, device=device)
    weights.contiguous(lhs, weights.packed, out, groups)
    check(out, values(lhs, granularity), groups, weights.exact, LIMIT, "tail")
    nowhere = torch.full_like(groups, -1)
    out.fill_(float("nan"))
    weights.contiguous(lhs, weights.packed, out, nowhere)
    assert bool(out.isnan().all())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("kind", KINDS)
def test_c16_one_row_of_one_group(kind: str, granularity: str, device: str) -> None:
    run_contiguous(Weights(kind, 1, 24576, 1536, device), [1], 0, granularity, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("kind", KINDS)
def test_c16_ragged_groups(kind: str, granularity: str, device: str) -> None:
    weights = Weights(kind, 5, 320, 416, device)
    for gap in (0, 1, 130):
        run_contiguous(weights, [0, 1, 127, 128, 129], gap, granularity, device)
    run_masked(weights, [0, 1, 127, 128, 129], granularity, device)


def like(t: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply a change of layout, which copies, to the bytes of a tensor whose dtype torch may not copy."""
    return change(t.view(torch.uint8)).view(t.dtype) if t.dtype == E4M3 else change(t)


def into(storage: Tensor, view: Callable[[Tensor], Tensor], t: Tensor) -> Tensor:
    view(storage).copy_(t)
    return view(storage)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "every second column": lambda t: into(t.new_zeros(len(t), 2 * t.shape[1]), lambda b: b[:, ::2], t),
    "transposed": lambda t: t.t().contiguous().t(),
    "offset of one element": lambda t: into(t.new_zeros(t.numel() + 1), lambda b: b[1:].view(t.shape), t),
    "odd row stride": lambda t: into(t.new_zeros(len(t), max(65, t.shape[1] + 1)), lambda b: b[:, : t.shape[1]], t),
    "row stride + 16": lambda t: into(t.new_zeros(len(t), t.shape[1] + 16), lambda b: b[:, : t.shape[1]], t),
    "columns 16 and on": lambda t: into(t.new_zeros(len(t), t.shape[1] + 32), lambda b: b[:, 16:-16], t),
}
# What the kernels read as it is; scales in any layout are brought into their order.
READ = {(name, layout) for name in ("x", "out") for layout in ("row stride + 16", "columns 16 and on")}
READ |= {("scales", layout) for layout in LAYOUTS}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("operand", ["x", "scales", "out"])
def test_c17_strides(operand: str, layout: str, granularity: str, device: str) -> None:
    weights = Weights("fp8", 2, 64, 320, device)
    for rows in (2, 5, 6, 7, 64):
        groups = indices([rows // 2, rows - rows // 2], 0, device)
        x, scales = activations((rows, 320), granularity, device)
        scales = scales.reshape(rows, -1)
        expected = poison(rows, 64, device=device)
        weights.contiguous((x, scales), weights.packed, expected, groups)
        given = {"x": x, "scales": scales, "out": poison(rows, 64, device=device)}
        given[operand] = like(given[operand], LAYOUTS[layout])
        if (operand, layout) in READ:
            weights.contiguous((given["x"], given["scales"]), weights.packed, given["out"], groups)
            assert torch.equal(given["out"], expected), rows
        else:
            with pytest.raises(ValueError, match="needs unit stride .* and rows aligned to 16 bytes, got strides"):
                weights.contiguous((given["x"], given["scales"]), weights.packed, given["out"], groups)


@pytest.mark.parametrize("device", DEVICES)
def test_c17_strides_of_one_row_and_of_none(device: str) -> None:
    weights = Weights("fp8", 1, 64, 128, device)
    x, scales = activations((1, 128), "token", device)
    groups = torch.zeros(1, dtype=torch.int32, device=device)
    expected = poison(1, 64, device=device)
    weights.contiguous((x, scales), weights.packed, expected, groups)
    # the stride of a single row means nothing
    wide = like(x, lambda t: into(t.new_zeros(3, 144), lambda b: b[1:2, :128], t).as_strided((1, 128), (65, 1), 144))
    out = poison(1, 64, device=device)
    weights.contiguous((wide, scales), weights.packed, out, groups)
    assert torch.equal(out, expected)
    column = like(x, lambda t: into(t.new_zeros(128, 4), lambda b: b[:, :1].t(), t))
    with pytest.raises(ValueError, match="needs unit stride"):
        weights.contiguous((column, scales), weights.packed, out, groups)
    scale_column = torch.rand(4, 3, device=device)
    scale_column[1, 2] = scales[0]
    weights.contiguous((x, scale_column[1:2, 2:]), weights.packed, out.fill_(float("nan")), groups)
    assert torch.equal(out, expected)
    with pytest.raises(ValueError, match="m_indices: must be contiguous"):
        weights.contiguous(activations((2, 128), "token", device), weights.packed, poison(2, 64, device=device),
                           torch.zeros(4, dtype=torch.int32, device=device)[::2])  # fmt: skip
    none = poison(0, 64, device=device)
    weights.contiguous((x[:0], scales[:0]), weights.packed, none, groups[:0])
    weights.dense((x[:0], scales[:0]), weights.one, none)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("kind", KINDS)
def test_c23_all_positive(kind: str, granularity: str, device: str) -> None:
    weights = Weights(kind, GROUPS, 512 if device == "cuda" else 32, 7168, device, True)
    run_contiguous(weights, [100, 257, 0, 20], 1, granularity, device, POSITIVE_LIMIT, True)
    run_masked(weights, [3, 48, 0, 20], granularity, device, POSITIVE_LIMIT, True)


@pytest.mark.gpu
def test_c23_data_shows_a_missing_promotion() -> None:
    """The library's product without promotion fails on the same data, so the case can fail."""
    weights = Weights("fp8", 1, 512, 7168, "cuda", True)
    x, scales = activations((256, 7168), "token", "cuda", True)
    one = torch.ones(1, device="cuda")
    b = weights.packed[0][0]
    fast = torch._scaled_mm(x, b.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True).double()
    exact = x.double() @ b.double().t()
    assert scales.shape == (256,) and float((fast - exact).norm() / exact.norm()) > POSITIVE_LIMIT


# --- the rest that only a GPU can show ---


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_same_bits_in_fifty_runs_on_any_number_of_sms(kind: str) -> None:
    weights = gpu_weights(kind, 2880, 2880)
    groups = indices([130, 0, 7, 500], 1, "cuda")
    counts = torch.tensor([130, 0, 7, 500], dtype=torch.int32, device="cuda")
    for granularity in GRANULARITIES:
        lhs = activations((len(groups), 2880), granularity, "cuda")
        masked = activations((GROUPS, 500, 2880), granularity, "cuda")
        first: list[Tensor] = []
        for run in range(50):
            gemm.set_num_sms(3 if run % 10 == 9 else None)
            outputs = [poison(len(groups), 2880, device="cuda"), poison(GROUPS, 500, 2880, device="cuda")]
            weights.contiguous(lhs, weights.packed, outputs[0], groups)
            weights.masked(masked, weights.packed, outputs[1], counts, 160)
            gemm.set_num_sms(None)
            first = first or outputs
            for out, before in zip(outputs, first, strict=True):
                assert torch.equal(out.view(torch.int16), before.view(torch.int16)), run


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_strides_dense_and_graphs_on_the_gpu(kind: str) -> None:
    weights = Weights(kind, 1, 320, 512, "cuda")
    wide, scales = activations((200, 1024), "block128", "cuda")
    lhs = (wide[:, 512:], scales[:, 4:])
    out = poison(200, 400, device="cuda")[:, 40:360]
    weights.dense(lhs, weights.one, out)
    zeros = torch.zeros(200, dtype=torch.int32, device="cuda")
    exact = formats.dequantize_e4m3(wide[:, 512:].contiguous(), scales[:, 4:].contiguous(), "block128").double()
    check(out, exact, zeros, weights.exact, LIMIT, "dense, strided")
    # the counts of a captured masked call are read when it is replayed
    masked = ((wide[:, :512]).contiguous()[None], gemm.get_mn_major_tma_aligned_tensor(scales[None, :, :4]))
    result, count = poison(1, 200, 320, device="cuda"), torch.tensor([5], dtype=torch.int32, device="cuda")
    weights.masked(masked, weights.packed, result, count, 200)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        weights.masked(masked, weights.packed, result, count, 200)
    result.fill_(float("nan"))
    count.fill_(9)
    graph.replay()
    assert not bool(result[0, :9].isnan().any()) and bool(result[0, 9:].isnan().all())


@pytest.mark.gpu
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_a_captured_contiguous_call_are_read_when_it_is_replayed(kind: str, granularity: str) -> None:
    weights = gpu_weights(kind, 320, 320)
    x, scales = activations((300, 320), granularity, "cuda")
    scales = scales if granularity == "token" else gemm.get_mn_major_tma_aligned_tensor(scales)
    groups, out = indices([100, 100, 0, 100], 0, "cuda"), poison(300, 320, device="cuda")
    weights.contiguous((x, scales), weights.packed, out, groups)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        weights.contiguous((x, scales), weights.packed, out, groups)
    groups.copy_(torch.cat([indices([0, 7, 200, 0], 3, "cuda"), indices([0, 0, 0, 81], 0, "cuda")]))
    out.fill_(float("nan"))
    graph.replay()
    check(out, values((x, scales), granularity), groups, weights.exact, LIMIT, "replayed")


# --- operands of more than 2^31 elements ---

ROWS_31 = 2**31 // 7168 + 200


def few_rows(rows: int, k: int, granularity: str, used: list[slice]) -> tuple[Tensor, Tensor]:
    """Return activations of many rows, of which only some are not zero."""
    x = torch.zeros(rows, k, dtype=torch.uint8, device="cuda").view(E4M3)
    scales = torch.zeros((rows,) if granularity == "token" else (rows, -(-k // 128)), device="cuda")
    for part in used:
        x[part], scales[part] = activations((len(range(*part.indices(rows))), k), granularity, "cuda")
    return x, scales


def check_few(
    out: Tensor, lhs: tuple[Tensor, Tensor], exact: Tensor, granularity: str, groups: dict[int, slice]
) -> None:
    """Check the rows of each group; `out` and `lhs` of many rows."""
    for group, part in groups.items():
        x = formats.dequantize_e4m3(lhs[0][part].contiguous(), lhs[1][part].contiguous(), granularity).double()
        zeros = torch.zeros(len(x), dtype=torch.int32, device="cuda")
        check(out[part], x, zeros, exact[group : group + 1], LIMIT, f"group {group}")


@pytest.mark.gpu
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize(("n", "k"), [(128, 7168), (7168, 128)], ids=["A", "D"])
@pytest.mark.parametrize("kind", KINDS)
def test_offsets_beyond_2_31_elements(kind: str, n: int, k: int, granularity: str) -> None:
    weights = gpu_weights(kind, n, k)
    last = slice(ROWS_31 - 130, ROWS_31)
    parts = {3: slice(0, 7), 1: slice(100, 101), 2: last}
    lhs = few_rows(ROWS_31, k, granularity, list(parts.values()))
    groups = torch.full((ROWS_31,), -1, dtype=torch.int32, device="cuda")
    for group, part in parts.items():
        groups[part] = group
    out = torch.zeros(ROWS_31, n, dtype=torch.bfloat16, device="cuda")
    assert max(lhs[0].numel(), out.numel()) > 2**31
    weights.contiguous(lhs, weights.packed, out, groups)
    check_few(out, lhs, weights.exact, granularity, parts)
    assert int(out[groups < 0].count_nonzero()) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_offsets_beyond_2_31_elements_masked(kind: str) -> None:
    weights, padded = gpu_weights(kind, 320, 7168), 80_000
    parts = {0: slice(0, 3), 3: slice(3 * padded, 3 * padded + 129)}
    x, scales = few_rows(GROUPS * padded, 7168, "token", list(parts.values()))
    out = torch.zeros(GROUPS, padded, 320, dtype=torch.bfloat16, device="cuda")
    assert x.numel() > 2**31
    counts = torch.tensor([3, 0, 0, 129], dtype=torch.int32, device="cuda")
    weights.masked((x.view(GROUPS, padded, 7168), scales.view(GROUPS, padded)), weights.packed, out, counts, 100)
    check_few(out.flatten(0, 1), (x, scales), weights.exact, "token", parts)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_offsets_beyond_2_31_elements_of_weights(kind: str) -> None:
    """Groups of the same weight, so many that the last one's bytes lie beyond 2^31."""
    one = Weights(kind, 1, 4096, 7168, "cuda")
    packed, copies = one.packed, 80 if kind == "fp8" else 150
    if kind == "fp8":
        packed = tuple(t.view(torch.uint8).repeat(copies, 1, 1).view(t.dtype) for t in packed)
        assert packed[0].numel() > 2**31
    else:
        whole = {"data": packed.data.repeat(copies, 1, 1, 1), "row_scale": packed.row_scale.repeat(copies, 1)}
        packed = dataclasses.replace(packed, **whole, side=packed.side * copies, reports=packed.reports * copies)
        assert packed.data.numel() > 2**31
    lhs = activations((40, 7168), "token", "cuda")
    groups = torch.tensor([copies - 1] * 33 + [0] * 7, dtype=torch.int32, device="cuda")
    out = poison(40, 4096, device="cuda")
    one.contiguous(lhs, packed, out, groups)
    check(out, values(lhs, "token"), torch.zeros_like(groups), one.exact, LIMIT, "weights")


@pytest.mark.gpu
def test_only_listed_kernels_were_launched() -> None:
    gpu = gpu_weights("sm90_ss", 128, 128)
    run_contiguous(gpu, [3, 0, 5, 1], 2, "token", "cuda")
    known = {source.name for source in [*all_sources(), *quantize_sources()]}
    launched = {name for name in jit_kernel.launched_kernels if "gemm" in name}
    assert launched and launched <= known, launched - known
