"""Checkpoints of attention layers: DeepSeek's names, and FP8 matrices with their block scales."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from megamoe.kernels.formats import dequantize_e4m3_weight

__all__ = ["rename_and_dequantize"]

_SCALES = (".weight_scale_inv", ".scale")


def rename_and_dequantize(state: dict[str, Any], prefix: str, names: Mapping[str, str]) -> None:
    """Bring a state dict to a module's own names, and FP8 matrices to FP32, in place.

    Args:
        state: of a whole model; only what begins with `prefix` is touched.
        prefix: of the module in it.
        names: other name -> the module's, of what comes behind the prefix, whole words ("wq_a", "compressor.wkv").

    Raises:
        ValueError: a scale that does not fit its matrix, or an FP8 matrix without one, whose codes alone mean nothing.
    """
    for key in [key for key in state if key.startswith(prefix)]:
        own = key[len(prefix) :]
        for name, ours in names.items():
            if own == name or own.startswith(name + "."):
                state[prefix + ours + own[len(name) :]] = state.pop(key)
                break
    for key in [key for key in state if key.startswith(prefix) and key.endswith(_SCALES)]:
        name = key.rpartition(".")[0] + ".weight"
        if name not in state:
            continue
        if not _is_fp8(state[name]):
            raise ValueError(f"{key}: stands beside {name}, which must be float8_e4m3fn and is {state[name].dtype}")
        try:
            state[name] = dequantize_e4m3_weight(state[name], state.pop(key).float())
        except ValueError as error:
            raise ValueError(f"{key}: {error}") from None
    for key in [key for key in state if key.startswith(prefix) and _is_fp8(state[key])]:
        wanted = " or ".join(key.removesuffix(".weight") + ending for ending in _SCALES)
        raise ValueError(f"{key}: is float8_e4m3fn and has no scales; load it together with {wanted}")


def _is_fp8(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == torch.float8_e4m3fn
