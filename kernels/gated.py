"""The activation of a dense MLP in one launch on Hopper: BF16 [gate | up] -> BF16, by `activation.activate` in FP32."""

from __future__ import annotations

import math
import struct
from functools import lru_cache

import torch
from torch import Tensor

from megamoe.kernels.activation import check_activation
from megamoe.kernels.eager import runs_kernels
from megamoe.kernels.jit import KernelSource
from megamoe.kernels.packed_launch import launch_packed

__all__ = ["gated_rows", "gated_rows_source", "takes_rows"]

_THREADS = 128
_KINDS = {"silu": 0, "swiglu_clamp": 1, "swiglu_oai": 2}  # GatedKind of impls/gated_rows.cuh
_VECTOR, _ALIGNMENT = 8, 16
_ARGS = struct.Struct("<2Q2q2f")  # GatedRowsArgs of impls/gated_rows.cuh


@lru_cache
def gated_rows_source(activation: str, arch: str = "sm_90a") -> KernelSource:
    """Return the kernel of an activation."""
    name = f"gated_rows_{activation}"
    code = f"""#include "megamoe/impls/gated_rows.cuh"
extern "C" __global__ void __launch_bounds__({_THREADS})
{name}(const __grid_constant__ megamoe::impls::GatedRowsArgs args) {{
    using namespace megamoe::impls;
    static_assert(sizeof(GatedRowsArgs) == {_ARGS.size}, "what the host packs");
    gated_rows<static_cast<GatedKind>({_KINDS[activation]})>(args);
}}
"""
    return KernelSource(name, code, name, arch)


def takes_rows(x: Tensor) -> bool:
    """Return whether `gated_rows` takes it: contiguous BF16 `[num_tokens, 2 * I]` on Hopper, I a multiple of 8."""
    fits = x.dtype == torch.bfloat16 and x.is_contiguous() and x.shape[1] % (2 * _VECTOR) == 0
    return fits and x.data_ptr() % _ALIGNMENT == 0 and runs_kernels(x.device)


def gated_rows(x: Tensor, *, activation: str, limit: float | None, alpha: float | None) -> Tensor:
    """Return `activate(gate, up)` rounded to BF16, for x with gate in its left half and up in its right one.

    Carries no gradient.

    Args:
        x: for which `takes_rows` is true.
        activation, limit, alpha: as `activation.activate` takes them.

    Returns:
        BF16 `[num_tokens, I]`.

    Raises:
        ConfigError: as `activation.check_activation`.
    """
    check_activation(activation, limit, alpha)
    num_tokens, columns = x.shape[0], x.shape[1] // 2
    out = torch.empty(num_tokens, columns, dtype=x.dtype, device=x.device)
    count = num_tokens * columns // _VECTOR
    if count:
        source = gated_rows_source(activation)
        launch_packed(
            source.name, lambda: source, x.device.index, -(-count // _THREADS), _THREADS, _ARGS,
            (
                *(x.data_ptr(), out.data_ptr(), columns // _VECTOR, count),
                *(math.inf if limit is None else limit, 0.0 if alpha is None else alpha),
            ),
        )  # fmt: skip
    return out
