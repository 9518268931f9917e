"""One rank's share of the MoE maths in plain PyTorch: the rounding points that every backend has, and the gradient.

Shape legend: T tokens of this rank, K experts per token, N rows that this rank's experts work on (one per token and
expert), E local experts, H hidden, I intermediate. All sums are FP32; nothing here communicates.

Rounding points:
- x is quantised to E4M3 (per token, or per token and 128 columns) when the weights are quantised;
- linear 1, its bias and the activation are FP32; `weight_position="before"` multiplies the routing weight in there;
- h is quantised to E4M3 per token and 128 columns when the weights are quantised, else rounded to their dtype;
- linear 2 is FP32, then the bias and, for "after", the routing weight;
- the result is one slot row per token and expert, BF16 (FP32 where the parameters are FP32); y sums slots in k order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megamoe.config import MoESpec
from megamoe.kernels.activation import activate
from megamoe.kernels.formats import dequantize_e4m3, quantize_e4m3
from megamoe.kernels.weights import ExpertWeights

__all__ = [
    "LocalGradients",
    "dequantize_rows",
    "local_backward",
    "local_forward",
    "quantize_rows",
    "slot_dtype",
    "sum_slots",
]

# h is always quantised in groups of this many intermediate columns, whatever the granularity of x
_H_GRANULARITY = "block128"


def slot_dtype(spec: MoESpec, param_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of combine slots: BF16, except that FP32 parameters keep FP32."""
    return torch.float32 if spec.weight_format == "none" and param_dtype == torch.float32 else torch.bfloat16


def quantize_rows(x: Tensor, spec: MoESpec) -> tuple[Tensor, ...]:
    """Return what travels for each row of x: `(x,)`, or `(codes, scale)` where activations are quantised.

    Args:
        x: `[T, H]`, floating.
        spec: its `act_scale` chooses the granularity.
    """
    return (x,) if spec.act_scale == "none" else tuple(quantize_e4m3(x, spec.act_scale))


def dequantize_rows(columns: Sequence[Tensor], spec: MoESpec) -> Tensor:
    """Return the FP32 rows that the result of `quantize_rows` stands for."""
    if spec.act_scale == "none":
        return columns[0].float()
    codes, scale = columns
    return dequantize_e4m3(codes, scale, spec.act_scale)


def _round_h(h: Tensor, spec: MoESpec, dtype: torch.dtype) -> Tensor:
    """Round h as it is stored between the linears, and return it in FP32."""
    if spec.act_scale == "none":
        return h.to(dtype).float()
    return dequantize_e4m3(*quantize_e4m3(h, _H_GRANULARITY), _H_GRANULARITY)


def _one_expert(experts: ExpertWeights, index: int) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return w13, w2, b13, b2 of one expert in FP32. One at a time: all experts in FP32 would not fit."""
    expert = experts.select(index, index + 1)
    w13, w2 = expert.dequantize()
    b13, b2 = (None if bias is None else bias[0].float() for bias in (expert.b13, expert.b2))
    return w13[0], w2[0], b13, b2


def _activate(gate: Tensor, up: Tensor, spec: MoESpec) -> Tensor:
    return activate(gate, up, activation=spec.activation, limit=spec.swiglu_limit, alpha=spec.swiglu_alpha)


def local_forward(
    rows: Tensor, row_weights: Tensor, counts: Sequence[int], experts: ExpertWeights, spec: MoESpec
) -> Tensor:
    """Run the local experts over the rows routed to them.

    Args:
        rows: `[N, H]` FP32, grouped by expert.
        row_weights: `[N]` FP32 routing weights.
        counts: rows of each local expert, in order; sums to N.
        experts: the local experts.
        spec: sizes, activation, formats.

    Returns:
        Slots `[N, H]` in `slot_dtype`.
    """
    slots = torch.empty(rows.shape, dtype=slot_dtype(spec, experts.w13.dtype), device=rows.device)
    start = 0
    for index, count in enumerate(counts):
        if count == 0:
            continue
        part = slice(start, start + count)
        start += count
        w13, w2, b13, b2 = _one_expert(experts, index)
        weight = row_weights[part, None]
        acc1 = rows[part] @ w13.t()
        if b13 is not None:
            acc1 += b13
        gate, up = acc1.chunk(2, dim=-1)
        h = _activate(gate, up, spec)
        if spec.weight_position == "before":
            h = weight * h
        acc2 = _round_h(h, spec, experts.w13.dtype) @ w2.t()
        if spec.weight_position == "after":
            slots[part] = weight * (acc2 if b2 is None else acc2 + b2)
        else:
            slots[part] = acc2 if b2 is None else acc2 + weight * b2
    return slots


def sum_slots(slots: Tensor, entries: Tensor, num_tokens: int, top_k: int) -> Tensor:
    """Add the slots of each token in k order, in FP32. A token without experts gets exact zeros.

    Args:
        slots: `[N, H]`, any order.
        entries: `[N]` int64, the flat position `token * top_k + k` of each slot.
        num_tokens: T.
        top_k: K.

    Returns:
        `[T, H]` FP32.
    """
    table = slots.new_zeros((num_tokens * top_k, slots.shape[-1]))
    table[entries] = slots
    table = table.view(num_tokens, top_k, slots.shape[-1])
    total = torch.zeros((num_tokens, slots.shape[-1]), dtype=torch.float32, device=slots.device)
    for k in range(top_k):
        total += table[:, k]
    return total


@dataclass(frozen=True)
class LocalGradients:
    """Gradients of `local_forward`; experts without rows have exact zeros.

    Attributes:
        rows: `[N, H]` FP32.
        row_weights: `[N]` FP32.
        w13, w2, b13, b2: as the parameters; biases None where there are none.
    """

    rows: Tensor
    row_weights: Tensor
    w13: Tensor
    w2: Tensor
    b13: Tensor | None
    b2: Tensor | None


def local_backward(
    grad_slots: Tensor,
    rows: Tensor,
    row_weights: Tensor,
    counts: Sequence[int],
    experts: ExpertWeights,
    spec: MoESpec,
) -> LocalGradients:
    """Recompute the local experts and return their gradients. Roundings count as the identity.

    Args:
        grad_slots: `[N, H]` FP32, the gradient of each slot, grouped by expert.
        rows, row_weights, counts, experts, spec: as in `local_forward`; the format must be `none`.
    """
    assert spec.weight_format == "none", "quantised experts have no gradient"
    grad_rows = torch.empty_like(rows)
    grad_weights = torch.empty_like(row_weights)
    grad_w13, grad_w2 = torch.zeros_like(experts.w13), torch.zeros_like(experts.w2)
    grad_b13 = None if experts.b13 is None else torch.zeros_like(experts.b13)
    grad_b2 = None if experts.b2 is None else torch.zeros_like(experts.b2)
    start = 0
    for index, count in enumerate(counts):
        if count == 0:
            continue
        part = slice(start, start + count)
        start += count
        w13, w2, b13, b2 = _one_expert(experts, index)
        weight, grad = row_weights[part, None], grad_slots[part]
        acc1 = rows[part] @ w13.t()
        if b13 is not None:
            acc1 += b13
        gate, up = acc1.chunk(2, dim=-1)
        h = _activate(gate, up, spec)
        if spec.weight_position == "before":
            rounded = _round_h(weight * h, spec, experts.w13.dtype)
            grad_acc2 = grad
            grad_scaled_h = grad @ w2
            grad_h = weight * grad_scaled_h
            grad_weight = (grad_scaled_h * h).sum(-1)
            if b2 is not None:
                grad_weight = grad_weight + grad @ b2
        else:
            rounded = _round_h(h, spec, experts.w13.dtype)
            acc2 = rounded @ w2.t()
            grad_weight = (grad * (acc2 if b2 is None else acc2 + b2)).sum(-1)
            grad_acc2 = weight * grad
            grad_h = grad_acc2 @ w2
        grad_acc1 = torch.cat(_activation_gradient(grad_h, gate, up, spec), dim=-1)
        grad_rows[part] = grad_acc1 @ w13
        grad_weights[part] = grad_weight
        grad_w13[index] = grad_acc1.t() @ rows[part]
        grad_w2[index] = grad_acc2.t() @ rounded
        if grad_b13 is not None:
            grad_b13[index] = grad_acc1.sum(0)
        if grad_b2 is not None:
            # the bias is weighted in both positions
            grad_b2[index] = (weight * grad).sum(0)
    return LocalGradients(grad_rows, grad_weights, grad_w13, grad_w2, grad_b13, grad_b2)


def _activation_gradient(grad: Tensor, gate: Tensor, up: Tensor, spec: MoESpec) -> tuple[Tensor, Tensor]:
    """Return the gradients of gate and up for `activate`. A clamped value passes no gradient, its limit itself does.

    With s = sigmoid(alpha g): d(g s)/dg = s (1 + alpha g (1 - s)); silu is alpha = 1.
    """
    limit = spec.swiglu_limit
    alpha, offset = 1.0, 0.0
    if spec.activation == "swiglu_oai":
        assert spec.swiglu_alpha is not None, "MoESpec resolves alpha"
        alpha, offset = spec.swiglu_alpha, 1.0
    g, u = gate, up
    if limit is not None:
        g, u = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
    s = torch.sigmoid(alpha * g)
    grad_gate = grad * (u + offset) * s * (1 + alpha * g * (1 - s))
    grad_up = grad * g * s
    if limit is not None:
        grad_gate = torch.where(gate > limit, 0.0, grad_gate)
        grad_up = torch.where(up.abs() > limit, 0.0, grad_up)
    return grad_gate, grad_up
