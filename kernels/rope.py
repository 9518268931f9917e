"""Rotary position embeddings: frequencies with or without YaRN, and the two ways to pair the elements of a head.

Shape letters: N tokens, D turned elements.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["apply_rope", "rope_frequencies", "rope_tables", "yarn_logit_scale"]

ROPE_STYLES = ("half", "interleaved")


def rope_frequencies(
    dim: int,
    theta: float,
    *,
    yarn_factor: float = 1.0,
    yarn_context: int = 4096,
    yarn_fast: float = 32.0,
    yarn_slow: float = 1.0,
    device: torch.device | str | None = None,
) -> Tensor:
    """Return the angle per position of each pair, `[dim / 2]` FP32: theta^(-2i / dim), stretched by YaRN.

    YaRN (arXiv:2309.00071, section 3.2): a frequency that turns more than `yarn_fast` times over `yarn_context` tokens
    stays, one that turns less than `yarn_slow` times is divided by `yarn_factor`, those between are blended linearly in
    the index of the pair, between the whole indices around the two bounds.
    """
    pair = torch.arange(dim // 2, dtype=torch.float64, device=device)
    frequencies = theta ** (-2.0 * pair / dim)
    if yarn_factor != 1.0:

        def pair_of(turns: float) -> float:
            return dim * math.log(yarn_context / (turns * 2 * math.pi)) / (2 * math.log(theta))

        low = max(math.floor(pair_of(yarn_fast)), 0)
        high = min(math.ceil(pair_of(yarn_slow)), dim - 1)
        divided = ((pair - low) / max(high - low, 1e-3)).clamp(0.0, 1.0)
        frequencies = frequencies * (1.0 - divided) + frequencies / yarn_factor * divided
    return frequencies.float()


def yarn_logit_scale(yarn_factor: float, yarn_mscale: float) -> float:
    """Return the factor on the scale of the logits: (0.1 mscale ln(factor) + 1)^2."""
    return (0.1 * yarn_mscale * math.log(yarn_factor) + 1.0) ** 2


def rope_tables(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosines and sines, both `[*positions.shape, D / 2]` FP32.

    The product of position and frequency is FP64: in FP32 the angle at a million tokens would be off by 0.03.
    """
    angles = positions.to(torch.float64).unsqueeze(-1) * frequencies.to(torch.float64)
    return angles.cos().float(), angles.sin().float()


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor, style: str, *, inverse: bool = False) -> Tensor:
    """Turn the pairs of the last dimension, in FP32.

    Args:
        x: `[N, ..., D]`, floating.
        cos, sin: `[N, D / 2]` FP32, of `rope_tables`.
        style: "half": pairs are (i, i + D/2); "interleaved": (2i, 2i + 1). Elements stay at their places in both.
        inverse: turn back.

    Returns:
        The shape and dtype of x.

    Raises:
        ValueError: another style.
    """
    if style not in ROPE_STYLES:
        raise ValueError(f"style: expected {' or '.join(ROPE_STYLES)}, got {style!r}")
    shape = (cos.shape[0], *(1,) * (x.dim() - 2), cos.shape[-1])
    cos, sin = cos.view(shape), sin.view(shape)
    if inverse:
        sin = -sin
    wide = x.float()
    if style == "half":
        first, second = wide.chunk(2, dim=-1)
    else:
        first, second = wide[..., 0::2], wide[..., 1::2]
    turned = (first * cos - second * sin, second * cos + first * sin)
    joined = torch.cat(turned, dim=-1) if style == "half" else torch.stack(turned, dim=-1).flatten(-2)
    return joined.to(x.dtype)
