"""The activations between the two linears of an expert."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from megamoe.config_sections import ACTIVATIONS
from megamoe.errors import ConfigError

__all__ = ["ACTIVATIONS", "activate", "check_activation"]


def check_activation(activation: str, limit: float | None, alpha: float | None) -> None:
    """Raise `ConfigError` unless `activate` accepts these, so that a module can refuse them when it is built.

    Args:
        activation: one of `ACTIVATIONS`.
        limit: positive and finite, or None for no clamp; silu takes None only.
        alpha: finite, for swiglu_oai, which needs it; the others take None only.
    """
    if activation not in ACTIVATIONS:
        raise ConfigError(f"activation: must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    if limit is not None and activation == "silu":
        raise ConfigError(f"limit: silu does not clamp, got {limit}; use swiglu_clamp, or no limit")
    if limit is not None and not 0 < limit < math.inf:
        raise ConfigError(f"limit: must be positive and finite, or None for no clamp, got {limit}")
    if activation != "swiglu_oai":
        if alpha is not None:
            raise ConfigError(f"alpha: {activation} has none, got {alpha}; use swiglu_oai, or no alpha")
    elif alpha is None or not math.isfinite(alpha):
        raise ConfigError(f"alpha: swiglu_oai needs a finite factor (gpt-oss: 1.702), got {alpha}")


def activate(gate: Tensor, up: Tensor, *, activation: str, limit: float | None, alpha: float | None) -> Tensor:
    """Return the activated product of gate and up in FP32, differentiable; a clamped value passes no gradient.

    - silu: g * sigmoid(g) * u (Shazeer, "GLU variants improve transformer", 2020).
    - swiglu_clamp: the same after g = min(g, limit) and u = clamp(u, -limit, limit).
    - swiglu_oai: g * sigmoid(alpha * g) * (u + 1) after the same clamps (gpt-oss).

    Args:
        gate: `[..., I]`, any floating dtype.
        up: `[..., I]`.
        activation: one of `ACTIVATIONS`.
        limit: of the clamps; None = no clamp.
        alpha: of swiglu_oai; None otherwise.

    Returns:
        `[..., I]` FP32. Finite gates of any size give no NaN: the sigmoid goes to 0, never an infinity times 0. So do
        their gradients as long as gate * (up + 1) is within FP32.

    Raises:
        ConfigError: as `check_activation`.
    """
    check_activation(activation, limit, alpha)
    g, u = gate.float(), up.float()
    if limit is not None:
        g, u = g.clamp(max=limit), u.clamp(min=-limit, max=limit)
    if alpha is not None:
        return g * torch.sigmoid(alpha * g) * (u + 1)
    return F.silu(g) * u
