"""Grouped and dense GEMM with FP8 activations and FP8 or MXFP4 weights: D = A @ B^T per group, BF16 output.

Names and argument order are those of DeepGEMM's public interface. On CUDA tensors the SM90 kernels run; on CPU tensors
the same functions multiply the dequantised operands in FP32.

A = (E4M3 values, FP32 scales): one scale per row, `[M]` or `[M, 1]`, or one per 128 of K, `[M, ceil(K / 128)]`. The
kernels read the latter with rows innermost (`get_mn_major_tma_aligned_tensor` makes that once); others are copied in
every call. B = (E4M3 `[G, N, K]`, FP32 scales `[G, ceil(N / 128), ceil(K / 128)]`), or a `PackedWeight`.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from megamoe import env
from megamoe.kernels import formats
from megamoe.kernels.comparer import comparer as _comparer
from megamoe.kernels.comparer import seen as _seen
from megamoe.kernels.gemm_instances import MAX_GROUPS, select_instance
from megamoe.kernels.gemm_launch import Plan
from megamoe.kernels.packing import PackedWeight

__all__ = [
    "fp8_fp4_gemm_nt",
    "fp8_gemm_nt",
    "get_mn_major_tma_aligned_tensor",
    "get_num_sms",
    "m_grouped_fp8_fp4_gemm_nt_contiguous",
    "m_grouped_fp8_fp4_gemm_nt_masked",
    "m_grouped_fp8_gemm_nt_contiguous",
    "m_grouped_fp8_gemm_nt_masked",
    "set_num_sms",
]

Scaled = tuple[Tensor, Tensor]
Weight: TypeAlias = "Scaled | PackedWeight"

_MAX_PLANS = 4096
_DENSE = -1  # stands for expected_m where all rows count
_num_sms: int | None = None
# a build of torch without CUDA lacks it, and needs it not
_current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def set_num_sms(num_sms: int | None) -> None:
    """Set how many SMs a GEMM may use; None is all of the device.

    Raises:
        ValueError: not positive.
    """
    global _num_sms
    if num_sms is not None and num_sms < 1:
        raise ValueError(f"num_sms: must be at least 1, got {num_sms}")
    _num_sms = num_sms


def get_num_sms() -> int:
    """Return how many SMs a GEMM uses: what was set, else all of the current device."""
    if _num_sms is not None:
        return _num_sms
    return torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count


def get_mn_major_tma_aligned_tensor(scales: Tensor) -> Tensor:
    """Return scales per 128 of K in the order that the kernels read: rows innermost, columns 16-byte aligned.

    Args:
        scales: FP32 `[M, ceil(K / 128)]`, or `[G, M, ceil(K / 128)]` for the masked functions.

    Returns:
        The same values and shape; itself if it already has that order.
    """
    rows = scales.shape[:-1].numel()
    if _is_row_inner(scales, rows):
        return scales
    blocks = scales.shape[-1]
    storage = torch.empty((blocks, -(-rows // 4) * 4), dtype=scales.dtype, device=scales.device)
    out = storage[:, :rows].t().unflatten(0, scales.shape[:-1]) if scales.dim() != 2 else storage[:, :rows].t()
    return out.copy_(scales)


def m_grouped_fp8_gemm_nt_contiguous(lhs: Scaled, rhs: Scaled, out: Tensor, m_indices: Tensor) -> None:
    """Write out[r] = lhs[r] @ rhs[m_indices[r]]^T.

    Args:
        lhs: E4M3 `[M, K]` and its scales; K a multiple of 16.
        rhs: E4M3 `[G, N, K]` and its scales; N a multiple of 32.
        out: BF16 `[M, N]`; rows of no group stay as they are.
        m_indices: int32 `[M]`, the group of each row, or -1; rows of a group are neighbours, groups in any order.

    Raises:
        ValueError: a dtype, shape, stride or device outside the above; the message names the rule.
    """
    _grouped(lhs, rhs, out, m_indices, None)


def m_grouped_fp8_gemm_nt_masked(lhs: Scaled, rhs: Scaled, out: Tensor, masked_m: Tensor, expected_m: int) -> None:
    """Write out[g, r] = lhs[g, r] @ rhs[g]^T for r < masked_m[g]; counts are read on the device.

    Args:
        lhs: E4M3 `[G, M, K]` and scales `[G, M]`, `[G, M, 1]` or `[G, M, ceil(K / 128)]`; K a multiple of 16.
        rhs: E4M3 `[G, N, K]` and its scales; N a multiple of 32.
        out: BF16 `[G, M, N]`; other rows stay as they are.
        masked_m: int32 `[G]`.
        expected_m: rows that a group is expected to have; it decides the instance, never the result.

    Raises:
        ValueError: a dtype, shape, stride or device outside the above; the message names the rule.
    """
    _grouped(lhs, rhs, out, masked_m, expected_m)


def m_grouped_fp8_fp4_gemm_nt_contiguous(lhs: Scaled, rhs: PackedWeight, out: Tensor, m_indices: Tensor) -> None:
    """As `m_grouped_fp8_gemm_nt_contiguous` with packed MXFP4 weights; `sm90_rs` is made for few rows a group."""
    _grouped(lhs, rhs, out, m_indices, None)


def m_grouped_fp8_fp4_gemm_nt_masked(
    lhs: Scaled, rhs: PackedWeight, out: Tensor, masked_m: Tensor, expected_m: int
) -> None:
    """As `m_grouped_fp8_gemm_nt_masked` with packed MXFP4 weights; `sm90_rs` is made for few rows a group."""
    _grouped(lhs, rhs, out, masked_m, expected_m)


def fp8_gemm_nt(a: Scaled, b: Scaled, d: Tensor) -> None:
    """Write d = a @ b^T.

    Args:
        a: E4M3 `[M, K]` and its scales; K a multiple of 16.
        b: E4M3 `[N, K]` and scales `[ceil(N / 128), ceil(K / 128)]`; N a multiple of 32.
        d: BF16 `[M, N]`.

    Raises:
        ValueError: a dtype, shape, stride or device outside the above; the message names the rule.
    """
    _grouped(a, b, d, None, _DENSE)


def fp8_fp4_gemm_nt(a: Scaled, b: PackedWeight, d: Tensor) -> None:
    """As `fp8_gemm_nt` with packed MXFP4 weights of one expert."""
    _grouped(a, b, d, None, _DENSE)


class _Known(threading.local):
    """The plans of one thread: every call writes into a plan, so threads do not share them.

    Attributes:
        recent: plan, contents of the `PackedWeight` and comparer of the tensors, by what is cheap to ask.
        plans: by everything that was checked.
    """

    def __init__(self) -> None:
        self.recent: dict[tuple[object, ...], tuple[Plan, object, Callable[..., bool]]] = {}
        self.plans: dict[tuple[object, ...], Plan] = {}


_known = _Known()


def _grouped(lhs: Scaled, rhs: Weight, out: Tensor, groups: Tensor | None, expected_m: int | None) -> None:
    """`groups`: m_indices without `expected_m`, masked_m with it, None in a dense problem.

    A problem like one that was checked before is launched at once. That is the host's cost of a call, so what is asked
    again (everything that the checks look at) is asked in the cheapest way.
    """
    kept: object = None
    try:
        x, scales = lhs
        packed: object = None
        if isinstance(rhs, PackedWeight):
            b, b_scales = rhs.data, rhs.row_scale
            packed = (rhs.layout, rhs.version, rhs.rows, rhs.columns)
        else:
            b, b_scales = rhs
        b_pointer = b.data_ptr()
        plan, same_packed, fits = _known.recent[b_pointer, x.numel(), expected_m, _num_sms]
        if groups is None:
            ready = fits(x, scales, b, b_scales, out)
            groups_pointer = 0
        else:
            ready = fits(x, scales, b, b_scales, out, groups)
            groups_pointer = groups.data_ptr()
        pointers = (x.data_ptr(), scales.data_ptr(), b_pointer, b_scales.data_ptr(), out.data_ptr(), groups_pointer)
        ready = ready and packed == same_packed and (pointers == plan.pointers or plan.point(pointers))
    except (AttributeError, KeyError, TypeError, ValueError):
        ready = False
    if not ready:
        found, kept = _check_and_plan(lhs, rhs, out, groups, expected_m)
        if found is None:
            return
        plan = found
    if plan.is_alone or torch.cuda.current_device() == plan.device:
        plan(_current_stream(plan.device))
    else:
        with torch.cuda.device(plan.device):
            plan(_current_stream(plan.device))
    del kept


def _check_and_plan(
    lhs: Scaled, rhs: Weight, out: Tensor, groups: Tensor | None, expected_m: int | None
) -> tuple[Plan | None, Tensor | None]:
    """Check a problem; on a CPU, or without rows, do it.

    Returns:
        The plan to launch, or None when nothing is left to do; and what must live until then.
    """
    given = lhs, rhs
    if groups is None:
        lhs, rhs, out, expected_m = _as_one_group(lhs, rhs, out)
    granularity = _check(lhs, rhs, out, groups, expected_m)
    if not _has_kernels(out):
        _multiply_dequantised(lhs, rhs, out, groups, expected_m)
        return None, None
    num_rows = out.shape[:-1].numel()
    if num_rows == 0:
        return None, None
    x, scales = lhs
    packed: object = None
    layout: str | None = None
    if isinstance(rhs, PackedWeight):
        b, b_scales, layout = rhs.data, rhs.row_scale, rhs.layout
        packed = (rhs.layout, rhs.version, rhs.rows, rhs.columns)
    else:
        b, b_scales = rhs
    in_order = granularity == "token" or _is_row_inner(scales, num_rows)
    tensors = (x, scales, b, b_scales, out) if groups is None else (x, scales, b, b_scales, out, groups)
    cheap = (b.data_ptr(), x.numel(), _DENSE if groups is None else expected_m, _num_sms)
    key = (*cheap, packed, in_order, _seen(tensors))
    plan = _known.plans.get(key)
    if plan is None:
        hint = -(-num_rows // b.shape[0]) if expected_m is None else expected_m
        masked = expected_m is not None
        instance = select_instance("fp4" if packed else "fp8", granularity, hint, masked, layout=layout)
        plan = Plan(instance, (x, scales, b, b_scales, out, groups), masked, x.shape[-1], _num_sms, in_order)
        if env.flag("MEGAMOE_PRINT_CONFIGS"):
            shape = f"groups={b.shape[0]} rows={out.shape[-2]} n={out.shape[-1]} k={x.shape[-1]}"
            print(f"megamoe gemm: {shape} -> {instance.name}, {plan.grid} blocks", file=sys.stderr)
        if len(_known.plans) >= _MAX_PLANS:
            _known.plans.clear()
            _known.recent.clear()
        _known.plans[key] = plan
    if plan.copies_scales:
        scales = scales.reshape(-1).contiguous() if plan.per_token else get_mn_major_tma_aligned_tensor(scales)
    else:
        # as the caller passes them, so that the next call finds them without a view
        (x_given, scales_given), rhs_given = given
        b_given = (b, b_scales) if isinstance(rhs_given, PackedWeight) else tuple(rhs_given)
        shown = (x_given, scales_given, *b_given, out if groups is not None else out.squeeze(0))
        _known.recent[cheap] = (plan, packed, _comparer(shown if groups is None else (*shown, groups)))
    groups_pointer = 0 if groups is None else groups.data_ptr()
    plan.point((x.data_ptr(), scales.data_ptr(), b.data_ptr(), b_scales.data_ptr(), out.data_ptr(), groups_pointer))
    return plan, scales


def _has_kernels(out: Tensor) -> bool:
    return out.is_cuda


def _as_one_group(a: Scaled, b: Weight, d: Tensor) -> tuple[Scaled, Weight, Tensor, int]:
    """Return a dense problem as one group that has all rows, and their number."""
    _pair("a", a)
    x, scales = a
    if x.dim() != 2 or d.dim() != 2:
        raise ValueError(f"a, d: must be [M, K] and [M, N], got {list(x.shape)} and {list(d.shape)}")
    if isinstance(b, PackedWeight):
        if b.num_experts != 1:
            raise ValueError(f"b: a dense GEMM takes a weight of one expert, got {b.num_experts}")
        weight: Weight = b
    else:
        _pair("b", b)
        w, w_scales = b
        if w.dim() != 2 or w_scales.dim() != 2:
            got = f"{list(w.shape)}, {list(w_scales.shape)}"
            raise ValueError(f"b: must be [N, K] with scales of two dimensions, got {got}")
        weight = (w.unsqueeze(0), w_scales.unsqueeze(0))
    return (x.unsqueeze(0), scales.unsqueeze(0)), weight, d.unsqueeze(0), x.shape[0]


def _pair(name: str, pair: object) -> None:
    if not (isinstance(pair, (tuple, list)) and len(pair) == 2 and all(isinstance(t, Tensor) for t in pair)):
        raise ValueError(f"{name}: must be a pair (values, scales) of tensors, got {type(pair).__name__}")


def _is_row_inner(scales: Tensor, rows: int) -> bool:
    """Whether scales per 128 of K lie as the kernel reads them."""
    if scales.dtype != torch.float32 or scales.data_ptr() % 16 or rows == 0:
        return False
    *lead, row_stride, block_stride = scales.stride()
    if row_stride != 1 or block_stride % 4 or block_stride < rows:
        return False
    return not (lead and scales.shape[0] > 1 and lead != [scales.shape[1]])


def _check(lhs: Scaled, rhs: Weight, out: Tensor, groups: Tensor | None, expected_m: int | None) -> str:
    """Refuse what the kernels can't read; return the granularity of the activation scales."""
    _pair("lhs", lhs)
    for name, tensor in (("out", out), ("m_indices" if expected_m is None else "masked_m", groups)):
        if tensor is not None and not isinstance(tensor, Tensor):
            raise ValueError(f"{name}: must be a tensor, got {type(tensor).__name__}")
    x, scales = lhs
    masked = expected_m is not None
    dims = 3 if masked else 2
    shape = "[G, M, K]" if masked else "[M, K]"
    if x.dtype != torch.float8_e4m3fn or x.dim() != dims:
        raise ValueError(f"lhs: values must be float8_e4m3fn {shape}, got {x.dtype} {list(x.shape)}")
    rows, k = x.shape[-2:]
    if isinstance(rhs, PackedWeight):
        num_groups, n, weight_k = rhs.shape
        rhs.require("rhs", "sm90_rs" if rhs.layout == "sm90_rs" else "sm90_ss")
        tensors = [rhs.data, rhs.row_scale]
    else:
        _pair("rhs", rhs)
        w, w_scales = rhs
        if w.dtype != torch.float8_e4m3fn or w.dim() != 3:
            raise ValueError(f"rhs: values must be float8_e4m3fn [G, N, K], got {w.dtype} {list(w.shape)}")
        num_groups, n, weight_k = w.shape
        expected = [num_groups, -(-n // 128), -(-weight_k // 128)]
        if w_scales.dtype != torch.float32 or list(w_scales.shape) != expected:
            raise ValueError(f"rhs: scales must be float32 {expected}, got {w_scales.dtype} {list(w_scales.shape)}")
        tensors = [w, w_scales]
    if any(not t.is_contiguous() for t in tensors):
        raise ValueError("rhs: values and scales must be contiguous")
    if tensors[0].data_ptr() % 16:
        raise ValueError("rhs: values must be aligned to 16 bytes")
    if k != weight_k:
        raise ValueError(f"lhs, rhs: K must be the same, got {k} and {weight_k}")
    if k == 0 or k % 16:
        raise ValueError(f"lhs: K must be a positive multiple of 16, got {k}")
    if n == 0 or n % 32:
        raise ValueError(f"rhs: N must be a positive multiple of 32, got {n}")
    if not 1 <= num_groups <= MAX_GROUPS:
        raise ValueError(f"rhs: must have 1 to {MAX_GROUPS} groups, got {num_groups}")
    if masked and x.shape[0] != num_groups:
        raise ValueError(f"lhs: must have the {num_groups} groups of rhs, got {x.shape[0]}")
    if x.shape[:-1].numel() >= 2**31 - 1024:
        raise ValueError(f"lhs: must have fewer than 2^31 - 1024 rows, got {x.shape[:-1].numel()}")
    lead = list(x.shape[:-1])
    blocks = -(-k // 128)
    if scales.dtype != torch.float32 or list(scales.shape) not in (lead, [*lead, 1], [*lead, blocks]):
        raise ValueError(
            f"lhs: scales must be float32 {lead}, {[*lead, 1]} or {[*lead, blocks]}, got {scales.dtype} "
            f"{list(scales.shape)}"
        )
    if out.dtype != torch.bfloat16 or list(out.shape) != [*lead, n]:
        raise ValueError(f"out: must be bfloat16 {[*lead, n]}, got {out.dtype} {list(out.shape)}")
    what, length = ("masked_m", num_groups) if masked else ("m_indices", rows)
    if groups is not None:
        if groups.dtype != torch.int32 or list(groups.shape) != [length] or not groups.is_contiguous():
            raise ValueError(f"{what}: must be contiguous int32 [{length}], got {groups.dtype} {list(groups.shape)}")
        tensors.append(groups)
    if expected_m is not None and expected_m < 0:
        raise ValueError(f"expected_m: must not be negative, got {expected_m}")
    devices = {t.device for t in (x, scales, *tensors, out)}
    if len(devices) != 1:
        names = ", ".join(sorted(map(str, devices)))
        raise ValueError(f"lhs, rhs, out, {what}: must be on one device, got {names}")
    for name, tensor, unit in (("lhs", x, 16), ("out", out, 8)):
        strides = tensor.stride()
        if rows and (strides[-1] != 1 or tensor.data_ptr() % 16 or (rows > 1 and strides[-2] % unit)):
            raise ValueError(
                f"{name}: needs unit stride along its columns, and rows aligned to 16 bytes, got strides {strides}"
            )
        if rows > 1 and strides[-2] < tensor.shape[-1]:
            raise ValueError(f"{name}: rows must not overlap, got strides {strides}")
        if masked and num_groups > 1 and rows and strides[0] != rows * strides[1]:
            raise ValueError(f"{name}: groups must follow each other without a gap, got strides {strides}")
    return "token" if list(scales.shape) in (lead, [*lead, 1]) else "block128"


def _multiply_dequantised(lhs: Scaled, rhs: Weight, out: Tensor, groups: Tensor | None, expected_m: int | None) -> None:
    """The CPU's way: FP32 products of the dequantised operands, rounded to BF16."""
    x, scales = lhs
    per_row = scales.shape == x.shape[:-1] or scales.shape[-1] == 1
    if per_row:
        values = formats.dequantize_e4m3(x, scales.reshape(x.shape[:-1]), "token")
    else:
        values = formats.dequantize_e4m3(x, scales, "block128")
    num_groups = rhs.num_experts if isinstance(rhs, PackedWeight) else rhs[0].shape[0]
    for g in range(num_groups):
        if groups is None or expected_m is not None:
            count = x.shape[1] if groups is None else min(max(int(groups[g]), 0), x.shape[1])
            source, target = values[g, :count], out[g, :count]
        else:
            rows = (groups == g).nonzero().flatten()
            if rows.numel() == 0:
                continue
            first, last = int(rows[0]), int(rows[-1]) + 1
            if last - first != rows.numel():
                raise ValueError(f"m_indices: the rows of a group must be neighbours, those of group {g} are not")
            source, target = values[first:last], out[first:last]
        if isinstance(rhs, PackedWeight):
            weight = formats.dequantize_mxfp4(*rhs.unpack_expert(g))
        else:
            weight = formats.dequantize_e4m3_weight(rhs[0][g], rhs[1][g])
        target.copy_(source @ weight.t())
