"""The C++ engine as Python sees it: loading it, and turning the numbers of an op into its own."""

from __future__ import annotations

import functools
from importlib import import_module
from typing import Any

import torch

from megamoe.config import MoESpec

__all__ = ["engine_layer", "load", "weight_format", "why_missing"]

_SCALARS = {torch.float32: "fp32", torch.bfloat16: "bf16"}


@functools.cache
def _attempt() -> tuple[Any, str | None]:
    try:
        return import_module("megamoe._host"), None
    except ImportError as error:
        return None, f"the C++ engine is not part of this install ({error})"


def why_missing() -> str | None:
    """Return why the engine cannot be loaded (half a sentence), or None when it can."""
    return _attempt()[1]


def load() -> Any:
    """Return the module `megamoe._host`.

    Raises:
        ImportError: it was not built.
    """
    module, reason = _attempt()
    if module is None:
        raise ImportError(reason)
    return module


def weight_format(spec: MoESpec, param_dtype: torch.dtype) -> Any:
    """Return the engine's number format of the weights; `param_dtype` matters for the format `none` alone."""
    host = load()
    if spec.weight_format == "none" and param_dtype not in _SCALARS:
        raise ValueError(f"w13: the cpu backend takes bfloat16 or float32 weights, got {param_dtype}")
    name = _SCALARS[param_dtype] if spec.weight_format == "none" else spec.weight_format
    return getattr(host.WeightFormat, name)


def engine_layer(
    spec: MoESpec, world_size: int, num_workers: int, *, input_dtype: torch.dtype, param_dtype: torch.dtype
) -> Any:
    """Return the engine's description of one layer.

    Args:
        spec: the op's numbers.
        world_size: ranks that share the experts.
        num_workers: threads of the engine on this rank; they decide the smallest ring.
        input_dtype: of x, FP32 or BF16.
        param_dtype: of weights that are not quantised.
    """
    host = load()
    config = host.LayerConfig()
    config.hidden, config.intermediate = spec.hidden, spec.intermediate
    config.num_experts, config.top_k = spec.num_experts, spec.top_k
    config.format = weight_format(spec, param_dtype)
    config.act_scale = getattr(host.ActScale, spec.act_scale)
    config.activation = getattr(host.Activation, spec.activation)
    config.has_limit = spec.swiglu_limit is not None
    config.limit = spec.swiglu_limit or 0.0
    config.alpha = spec.swiglu_alpha or 0.0
    config.bias = spec.expert_bias
    config.weight_before = spec.weight_position == "before"
    config.input = getattr(host.Scalar, _SCALARS[input_dtype])
    return host.Layer(config, world_size, num_workers, host.TileShape())
