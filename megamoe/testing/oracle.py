"""The oracle of the MoE op: float64 maths over all experts in one process, with the op's rounding points.

It shares no code with the op, the router, the formats or the layers, and rounds to E4M3 in its own way (nearest entry
of a table), so that a mistake there cannot cancel here. Where a rounding point is defined as an FP32 operation (scales,
quotients, the sum over k) the oracle does it in float64 and rounds once to FP32, which is what IEEE defines.

Shape letters: T tokens, K experts per token, E experts over all ranks, H hidden, I intermediate.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["moe_oracle", "moe_oracle_exact"]

_ACT_SCALES = ("none", "token", "block128")
_WEIGHT_FORMATS = ("none", "fp8_block", "mxfp4")
_COLUMNS = 128


@torch.no_grad()
def moe_oracle(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w13: Tensor,
    w2: Tensor,
    *,
    b13: Tensor | None = None,
    b2: Tensor | None = None,
    activation: str,
    limit: float | None = None,
    alpha: float | None = None,
    weight_position: str = "after",
    weight_format: str = "none",
    act_scale: str = "none",
    slot_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return what the op must return, up to the order of its FP32 sums.

    Rounding points: x to E4M3 by `act_scale`; h to E4M3 per token and 128 columns when the weights are quantised, else
    to the dtype of w2; each slot to `slot_dtype`; the sum over k in FP32, in k order; y to the dtype of x.

    Args:
        x: `[T, H]`, floating.
        topk_ids: `[T, K]` int32 or int64; an id < 0 or >= E is no expert. Duplicates add up.
        topk_weights: `[T, K]`; not read where there is no expert.
        w13: `[E, 2I, H]` of all experts, gate rows first, dequantised. Not quantised: in the parameters' own dtype.
        w2: `[E, H, I]`, likewise.
        b13, b2: biases `[E, 2I]` and `[E, H]`.
        activation: "silu", "swiglu_clamp" or "swiglu_oai".
        limit: of the clamps of gate (from above) and up (both sides); None = no clamp.
        alpha: of swiglu_oai.
        weight_position: routing weight "after" or "before" the second linear; the bias b2 is weighted in both.
        weight_format: "none", "fp8_block" or "mxfp4": what the weights were before they were dequantised.
        act_scale: "none", "token" or "block128".
        slot_dtype: None = the op's rule: FP32 for FP32 weights that are not quantised, else BF16; float64 = slots and
            their sum are not rounded.

    Returns:
        `[T, H]` in the dtype of x.

    Raises:
        ValueError: a word that is not among the choices.
    """
    _check_word("act_scale", act_scale, _ACT_SCALES)
    _check_word("weight_format", weight_format, _WEIGHT_FORMATS)
    _check_word("weight_position", weight_position, ("after", "before"))
    quantised = weight_format != "none"
    if slot_dtype is None:
        slot_dtype = torch.float32 if w2.dtype == torch.float32 and not quantised else torch.bfloat16

    rows = x.double()
    if act_scale != "none":
        rows = _e4m3_groups(rows, rows.shape[-1] if act_scale == "token" else _COLUMNS)
    slots = torch.zeros(*topk_ids.shape, x.shape[-1], dtype=torch.float64, device=x.device)
    for expert in range(w13.shape[0]):
        token, k = (topk_ids == expert).nonzero(as_tuple=True)
        if token.numel() == 0:
            continue
        weight = topk_weights[token, k].double().unsqueeze(-1)
        linear1 = rows[token] @ w13[expert].double().T + _bias(b13, expert)
        gate, up = linear1.tensor_split(2, dim=-1)
        h = _activation(gate, up, activation, limit, alpha)
        if weight_position == "before":
            h = weight * h
        h = h.float().double()
        h = _e4m3_groups(h, _COLUMNS) if quantised else h.to(w2.dtype).double()
        linear2 = h @ w2[expert].double().T
        bias2 = _bias(b2, expert)
        slot = linear2 + weight * bias2 if weight_position == "before" else weight * (linear2 + bias2)
        slots[token, k] = slot.to(slot_dtype).double()
    sum_dtype = torch.float64 if slot_dtype == torch.float64 else torch.float32
    total = torch.zeros(x.shape, dtype=sum_dtype, device=x.device)
    for k_idx in range(topk_ids.shape[1]):
        total = (total.double() + slots[:, k_idx]).to(sum_dtype)
    return total.to(x.dtype)


@torch.no_grad()
def moe_oracle_exact(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w13: Tensor,
    w2: Tensor,
    *,
    b13: Tensor | None = None,
    b2: Tensor | None = None,
    activation: str,
    limit: float | None = None,
    alpha: float | None = None,
) -> Tensor:
    """Return the result of plain float64 maths without any rounding, `[T, H]` float64.

    Arguments as in `moe_oracle`, with the original weights, not quantised. Where the routing weight is applied makes
    no difference here.
    """
    y = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for expert in range(w13.shape[0]):
        token, k = (topk_ids == expert).nonzero(as_tuple=True)
        linear1 = x[token].double() @ w13[expert].double().T + _bias(b13, expert)
        half = linear1.shape[-1] // 2
        h = _activation(linear1[:, :half], linear1[:, half:], activation, limit, alpha)
        linear2 = h @ w2[expert].double().T + _bias(b2, expert)
        y.index_add_(0, token, topk_weights[token, k].double().unsqueeze(-1) * linear2)
    return y


def _bias(bias: Tensor | None, expert: int) -> Tensor | float:
    return 0.0 if bias is None else bias[expert].double()


def _activation(gate: Tensor, up: Tensor, name: str, limit: float | None, alpha: float | None) -> Tensor:
    """Evaluate the activation by its definition; exp may overflow to infinity, and then the quotient is 0."""
    _check_word("activation", name, ("silu", "swiglu_clamp", "swiglu_oai"))
    if name != "silu" and limit is not None:
        gate = torch.where(gate > limit, limit, gate)
        up = torch.where(up > limit, limit, torch.where(up < -limit, -limit, up))
    if name == "swiglu_oai":
        if alpha is None:
            raise ValueError("alpha: swiglu_oai needs it, got None")
        return gate / (1 + torch.exp(-alpha * gate)) * (up + 1)
    return gate / (1 + torch.exp(-gate)) * up


def _e4m3_values() -> list[float]:
    """Return the magnitudes of E4M3 by code, 0x00 to 0x7e: 4 exponent bits with bias 7, 3 of mantissa."""
    values = []
    for exponent in range(16):
        for mantissa in range(8):
            if exponent == 0:
                values.append(mantissa / 8 / 64)
            else:
                values.append((1 + mantissa / 8) * 2.0 ** (exponent - 7))
    return values[:-1]  # 0x7f is NaN


def _round_e4m3(v: Tensor) -> Tensor:
    """Round float64 values to the nearest E4M3 value; a tie goes to the even code, beyond 448 it saturates."""
    table = torch.tensor(_e4m3_values(), dtype=torch.float64, device=v.device)
    magnitude = v.abs().clamp(max=448.0)
    above = torch.searchsorted(table, magnitude).clamp(max=len(table) - 1)  # first code whose value is not below
    below = (above - 1).clamp(min=0)
    to_above, to_below = table[above] - magnitude, magnitude - table[below]
    take_above = (to_above < to_below) | ((to_above == to_below) & (above % 2 == 0))
    rounded = torch.copysign(torch.where(take_above, table[above], table[below]), v)
    return torch.where(v.isnan(), v, rounded)


def _e4m3_groups(rows: Tensor, width: int) -> Tensor:
    """Quantise and dequantise `[N, columns]` float64 in groups of `width` columns; the last may be short.

    amax without NaN, clamped to [448 * 2^-126, FP32 max]; scale = amax / 448, inverse = 1 / scale, quotient =
    value * inverse, each rounded to FP32.
    """
    parts = []
    for group in rows.split(width, dim=-1):
        amax = torch.where(group.isnan(), 0.0, group.abs()).amax(-1, keepdim=True)
        amax = amax.clamp(min=448 * 2.0**-126, max=torch.finfo(torch.float32).max)
        scale = (amax / 448).float().double()
        inverse = (1 / scale).float().double()
        parts.append(_round_e4m3((group * inverse).float().double()) * scale)
    return torch.cat(parts, dim=-1)


def _check_word(name: str, word: str, choices: tuple[str, ...]) -> None:
    if word not in choices:
        raise ValueError(f"{name}: must be one of {', '.join(choices)}, got {word!r}")
