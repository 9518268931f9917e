"""The grouped GEMM: on a CPU the dequantised product; on a GPU a grid of problems against FP64."""

from __future__ import annotations

import functools

import pytest

torch = pytest.importorskip("torch")

from helpers_packing import random_experts, values64  # noqa: E402

from megamoe.kernels import formats, gemm  # noqa: E402
from megamoe.kernels.gemm_instances import all_sources  # noqa: E402
from megamoe.kernels.jit import kernel as jit_kernel  # noqa: E402
from megamoe.kernels.packing import pack_mxfp4  # noqa: E402
from megamoe.kernels.quantize import quantize_sources  # noqa: E402

Tensor = torch.Tensor
E4M3 = torch.float8_e4m3fn
ROWS = (0, 1, 7, 64, 127, 128, 129, 1000)
GROUPS = 4
SHAPES = ((128, 128), (320, 320), (2880, 2880), (4096, 7168), (7168, 128), (128, 4096))
LIMIT, POSITIVE_LIMIT = 2.5e-3, 4e-3  # relative L2; a BF16 output alone gives 1.7e-3
GPU_WEIGHTS = ("fp8", "sm90_ss", "sm90_rs")


class Weights:
    """The weights of some groups: what the kernels take, and their values in FP64."""

    def __init__(self, kind: str, num_groups: int, n: int, k: int, device: str, positive: bool = False) -> None:
        generator = torch.Generator().manual_seed(n + k)
        if kind == "fp8":
            values = torch.randn(num_groups, n, k, generator=generator)
            values = (values.abs() + 0.1 if positive else values).to(device)
            self.packed = formats.quantize_e4m3_weight(values)
            self.exact = formats.dequantize_e4m3_weight(*self.packed).double()
        else:
            codes, scales = random_experts(num_groups, n, k)
            codes = (codes & 0x77 if positive else codes).to(device)
            scales = scales.to(device)
            self.packed = pack_mxfp4(codes, scales, kind)
            self.exact = values64(codes, scales)
        self.contiguous = gemm.m_grouped_fp8_gemm_nt_contiguous
        self.masked = gemm.m_grouped_fp8_gemm_nt_masked
        if kind != "fp8":
            self.contiguous = gemm.m_grouped_fp8_fp4_gemm_nt_contiguous
            self.masked = gemm.m_grouped_fp8_fp4_gemm_nt_masked


@functools.lru_cache(maxsize=2)
def gpu_weights(kind: str, n: int, k: int, positive: bool = False) -> Weights:
    return Weights(kind, GROUPS, n, k, "cuda", positive)


def activations(shape: tuple[int, ...], granularity: str, device: str, positive: bool = False) -> tuple[Tensor, Tensor]:
    x = torch.randn(*shape, device=device)
    return formats.quantize_e4m3(x.abs() + 0.1 if positive else x, granularity)


def values(lhs: tuple[Tensor, Tensor], granularity: str) -> Tensor:
    return formats.dequantize_e4m3(*lhs, granularity).double()


def sizes(kind: str, rows: int) -> list[int]:
    """Return the rows of each group."""
    if kind == "uniform":
        return [rows // GROUPS + (g < rows % GROUPS) for g in range(GROUPS)]
    if kind == "multinomial":
        generator = torch.Generator().manual_seed(rows)
        return torch.bincount(torch.randint(0, GROUPS, (rows,), generator=generator), minlength=GROUPS).tolist()
    if kind == "empty":
        return [0, rows // 2, 0, rows - rows // 2]
    return [0, 0, rows, 0]


def indices(counts: list[int], gap: int, device: str) -> Tensor:
    """Return the group of each row, with `gap` rows of no group behind each, groups in falling order."""
    parts = [torch.tensor([g] * counts[g] + [-1] * gap, dtype=torch.int32) for g in reversed(range(len(counts)))]
    return torch.cat(parts).to(device)


def poison(*shape: int, device: str) -> Tensor:
    return torch.full(shape, float("nan"), dtype=torch.bfloat16, device=device)


def check(out: Tensor, x: Tensor, groups: Tensor, weights: Tensor, limit: float, what: str) -> None:
    """Compare `out[r]` with `x[r] @ weights[groups[r]]^T`; rows of no group must still be NaN."""
    assert bool(out[groups < 0].isnan().all()), f"{what}: a row of no group was written"
    error = total = worst = 0.0
    for g in range(weights.shape[0]):
        rows = groups == g
        if not bool(rows.any()):
            continue
        expected = x[rows] @ weights[g].t()
        difference = out[rows].double() - expected
        error += float(difference.square().sum())
        total += float(expected.square().sum())
        worst = max(worst, float((difference.norm(dim=1) / expected.norm(dim=1)).nan_to_num(nan=float("inf")).max()))
    relative = (error / total) ** 0.5 if total else 0.0
    assert relative <= limit and worst <= 4 * limit, f"{what}: relative L2 {relative:.5f}, worst row {worst:.5f}"


def run_contiguous(
    weights: Weights,
    counts: list[int],
    gap: int,
    granularity: str,
    device: str,
    limit: float,
    k: int,
    positive: bool = False,
) -> None:
    groups = indices(counts, gap, device)
    lhs = activations((len(groups), k), granularity, device, positive)
    out = poison(len(groups), weights.exact.shape[1], device=device)
    weights.contiguous(lhs, weights.packed, out, groups)
    check(out, values(lhs, granularity), groups, weights.exact, limit, f"contiguous {counts} {granularity}")


def run_masked(weights: Weights, counts: list[int], granularity: str, device: str, limit: float, k: int) -> None:
    padded = max(counts) + 3
    lhs = activations((len(counts), padded, k), granularity, device)
    out = poison(len(counts), padded, weights.exact.shape[1], device=device)
    masked_m = torch.tensor(counts, dtype=torch.int32, device=device)
    weights.masked(lhs, weights.packed, out, masked_m, max(counts))
    place = torch.arange(padded, device=device)
    group = torch.arange(len(counts), device=device)[:, None].expand(-1, padded)
    groups = torch.where(place < masked_m[:, None], group, -1).flatten()
    flat = values(lhs, granularity).flatten(0, 1)
    check(out.flatten(0, 1), flat, groups, weights.exact, limit, f"masked {counts} {granularity}")


@pytest.mark.parametrize("granularity", ["token", "block128"])
@pytest.mark.parametrize("kind", GPU_WEIGHTS)
def test_cpu_multiplies_the_dequantised_operands(kind: str, granularity: str) -> None:
    weights = Weights(kind, GROUPS, 96, 160, "cpu")
    for counts in ([3, 0, 5, 1], [0, 0, 9, 0], [0, 0, 0, 0]):
        run_contiguous(weights, counts, 2, granularity, "cpu", LIMIT, 160)
        run_masked(weights, counts, granularity, "cpu", LIMIT, 160)


@pytest.mark.parametrize("kind", GPU_WEIGHTS)
def test_cpu_dense_is_the_case_of_one_group(kind: str) -> None:
    weights = Weights(kind, 1, 64, 128, "cpu")
    lhs = activations((5, 128), "token", "cpu")
    out, same = poison(5, 64, device="cpu"), poison(5, 64, device="cpu")
    weights.contiguous(lhs, weights.packed, same, torch.zeros(5, dtype=torch.int32))
    if kind == "fp8":
        gemm.fp8_gemm_nt(lhs, (weights.packed[0][0], weights.packed[1][0]), out)
    else:
        gemm.fp8_fp4_gemm_nt(lhs, weights.packed, out)
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


@pytest.mark.gpu
@pytest.mark.parametrize("granularity", ["token", "block128"])
@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("kind", GPU_WEIGHTS)
def test_grid_on_the_gpu(kind: str, n: int, k: int, granularity: str) -> None:
    weights = gpu_weights(kind, n, k)
    for rows in ROWS:
        for spread in ("uniform", "multinomial", "empty", "onehot"):
            run_contiguous(weights, sizes(spread, rows), rows % 3, granularity, "cuda", LIMIT, k)
        run_masked(weights, sizes("multinomial", rows), granularity, "cuda", LIMIT, k)


@pytest.mark.gpu
@pytest.mark.parametrize("granularity", ["token", "block128"])
@pytest.mark.parametrize("kind", GPU_WEIGHTS)
def test_all_positive_on_the_gpu(kind: str, granularity: str) -> None:
    weights = gpu_weights(kind, 512, 7168, True)
    run_contiguous(weights, [100, 257, 0, 20], 1, granularity, "cuda", POSITIVE_LIMIT, 7168, True)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", GPU_WEIGHTS)
def test_same_bits_in_fifty_runs_on_any_number_of_sms(kind: str) -> None:
    weights = gpu_weights(kind, 2880, 2880)
    groups = indices([130, 0, 7, 500], 1, "cuda")
    for granularity in ("token", "block128"):
        lhs = activations((len(groups), 2880), granularity, "cuda")
        outputs = []
        for run in range(50):
            gemm.set_num_sms(3 if run % 10 == 9 else None)
            outputs.append(poison(len(groups), 2880, device="cuda"))
            weights.contiguous(lhs, weights.packed, outputs[-1], groups)
        gemm.set_num_sms(None)
        for out in outputs[1:]:
            assert torch.equal(out.view(torch.int16), outputs[0].view(torch.int16))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", GPU_WEIGHTS)
def test_strides_dense_and_graphs_on_the_gpu(kind: str) -> None:
    weights = Weights(kind, 1, 320, 512, "cuda")
    wide, scales = activations((200, 1024), "block128", "cuda")
    lhs = (wide[:, 512:], scales[:, 4:])
    out = poison(200, 400, device="cuda")[:, 40:360]
    dense = gemm.fp8_gemm_nt if kind == "fp8" else gemm.fp8_fp4_gemm_nt
    rhs = (weights.packed[0][0], weights.packed[1][0]) if kind == "fp8" else weights.packed
    dense(lhs, rhs, out)
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
def test_only_listed_kernels_were_launched() -> None:
    gpu = gpu_weights("sm90_ss", 128, 128)
    run_contiguous(gpu, [3, 0, 5, 1], 2, "token", "cuda", LIMIT, 128)
    known = {source.name for source in [*all_sources(), *quantize_sources()]}
    launched = {name for name in jit_kernel.launched_kernels if "gemm" in name}
    assert launched and launched <= known, launched - known
