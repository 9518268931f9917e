"""Problems for the grouped GEMM and what is expected of them: products of the dequantised operands in FP64."""

from __future__ import annotations

from typing import Any

import torch
from helpers_packing import values64

from megamoe.kernels import formats, gemm
from megamoe.kernels.packing import pack_mxfp4

Tensor = torch.Tensor
E4M3 = torch.float8_e4m3fn
KINDS = ("fp8", "sm90_ss", "sm90_rs")
GRANULARITIES = ("token", "block128")
SPREADS = ("uniform", "multinomial", "empty", "onehot")
GROUPS = 4
LIMIT, POSITIVE_LIMIT = 2.5e-3, 4e-3  # relative L2; a BF16 output alone gives 1.7e-3


class Weights:
    """The weights of some groups: what the kernels take, and their values in FP64.

    Args:
        kind: "fp8", "sm90_ss" or "sm90_rs".
        num_groups, n, k: sizes.
        device: where they are made.
        positive: no value below zero.

    Attributes:
        packed: the second operand of the public functions.
        exact: `[num_groups, n, k]` FP64.
        contiguous, masked, dense: the public functions that take it.
    """

    def __init__(self, kind: str, num_groups: int, n: int, k: int, device: str, positive: bool = False) -> None:
        generator = torch.Generator(device).manual_seed(n + k)
        self.kind = kind
        self.packed: Any
        if kind == "fp8":
            values = torch.randn(num_groups, n, k, generator=generator, device=device)
            self.packed = formats.quantize_e4m3_weight(values.abs() + 0.1 if positive else values)
            self.exact = formats.dequantize_e4m3_weight(*self.packed).double()
        else:
            size = {"dtype": torch.uint8, "generator": generator, "device": device}
            codes = torch.randint(0, 256, (num_groups, n, k // 2), **size)
            codes = codes & 0x77 if positive else codes
            scales = torch.randint(118, 125, (num_groups, n, k // 32), **size)
            self.packed = pack_mxfp4(codes, scales, kind)
            self.exact = values64(codes, scales)
        name = "fp8" if kind == "fp8" else "fp8_fp4"
        self.contiguous = getattr(gemm, f"m_grouped_{name}_gemm_nt_contiguous")
        self.masked = getattr(gemm, f"m_grouped_{name}_gemm_nt_masked")
        self.dense = getattr(gemm, f"{name}_gemm_nt")

    @property
    def one(self) -> Any:
        """The second operand of the dense function, of a weight of one group."""
        return (self.packed[0][0], self.packed[1][0]) if self.kind == "fp8" else self.packed


def activations(shape: tuple[int, ...], granularity: str, device: str, positive: bool = False) -> tuple[Tensor, Tensor]:
    """Return random E4M3 values `[*shape]` and their scales."""
    x = torch.randn(*shape, device=device)
    return formats.quantize_e4m3(x.abs() + 0.1 if positive else x, granularity)


def values(lhs: tuple[Tensor, Tensor], granularity: str) -> Tensor:
    """Return the values of activations in FP64."""
    return formats.dequantize_e4m3(*lhs, granularity).double()


def sizes(spread: str, rows: int) -> list[int]:
    """Return the rows of each of `GROUPS` groups."""
    if spread == "uniform":
        return [rows // GROUPS + (g < rows % GROUPS) for g in range(GROUPS)]
    if spread == "multinomial":
        generator = torch.Generator().manual_seed(rows)
        return torch.bincount(torch.randint(0, GROUPS, (rows,), generator=generator), minlength=GROUPS).tolist()
    if spread == "empty":
        return [0, rows // 2, 0, rows - rows // 2]
    return [0, 0, rows, 0]


def indices(counts: list[int], gap: int, device: str) -> Tensor:
    """Return the group of each row, with `gap` rows of no group behind each, groups in falling order."""
    parts = [torch.tensor([g] * counts[g] + [-1] * gap, dtype=torch.int32) for g in reversed(range(len(counts)))]
    return torch.cat(parts).to(device)


def poison(*shape: int, device: str) -> Tensor:
    """Return BF16 NaN."""
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
    limit: float = LIMIT,
    positive: bool = False,
) -> None:
    """Run and check a contiguous problem: `counts` rows in each group, `gap` rows of no group behind it."""
    groups = indices(counts, gap, device)
    lhs = activations((len(groups), weights.exact.shape[2]), granularity, device, positive)
    out = poison(len(groups), weights.exact.shape[1], device=device)
    weights.contiguous(lhs, weights.packed, out, groups)
    check(out, values(lhs, granularity), groups, weights.exact, limit, f"contiguous {counts} {granularity}")


def run_masked(
    weights: Weights, counts: list[int], granularity: str, device: str, limit: float = LIMIT, positive: bool = False
) -> None:
    """Run and check a masked problem: `counts` rows of each group's padded matrix."""
    padded = max(counts) + 3
    lhs = activations((len(counts), padded, weights.exact.shape[2]), granularity, device, positive)
    out = poison(len(counts), padded, weights.exact.shape[1], device=device)
    masked_m = torch.tensor(counts, dtype=torch.int32, device=device)
    weights.masked(lhs, weights.packed, out, masked_m, max(counts))
    place = torch.arange(padded, device=device)
    group = torch.arange(len(counts), device=device)[:, None].expand(-1, padded)
    groups = torch.where(place < masked_m[:, None], group, -1).flatten()
    flat = values(lhs, granularity).flatten(0, 1)
    check(out.flatten(0, 1), flat, groups, weights.exact, limit, f"masked {counts} {granularity}")
