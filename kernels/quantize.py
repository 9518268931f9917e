"""The quantiser kernel: BF16 rows -> E4M3 rows and FP32 scales on Hopper, bit-equal to `formats.quantize_e4m3`."""

from __future__ import annotations

import ctypes
from functools import lru_cache

import torch

from megamoe.kernels import formats
from megamoe.kernels.jit import KernelSource, load

__all__ = ["quantize_e4m3", "quantize_source", "quantize_sources"]

_THREADS = 256
_VECTORS = (1, 2, 4, 8)  # vectors of 8 columns per thread: up to 2048, 4096, 8192, 16384 columns
_MAX_COLUMNS = _THREADS * _VECTORS[-1] * 8


@lru_cache
def quantize_source(vectors: int, per_token: bool, arch: str = "sm_90a") -> KernelSource:
    """Return the kernel for rows of at most `2048 * vectors` columns."""
    name = f"quantize_e4m3_v{vectors}_{'token' if per_token else 'block128'}"
    code = f"""#include "megamoe/impls/quantize_e4m3.cuh"
extern "C" __global__ void __launch_bounds__({_THREADS})
{name}(const megamoe::Bf16x8* x, long long x_stride_bytes, uint2* q, long long q_stride_bytes,
       float* scale, long long scale_stride, int num_vectors) {{
    constexpr int kThreads = {_THREADS}, kVectors = {vectors};
    constexpr bool kPerToken = {str(per_token).lower()};
    megamoe::quantize_e4m3_row<kThreads, kVectors, kPerToken>(x, x_stride_bytes, q, q_stride_bytes, scale,
                                                             scale_stride, num_vectors);
}}
"""
    return KernelSource(name=name, code=code, entry=name, arch=arch)


def quantize_sources(arch: str = "sm_90a") -> list[KernelSource]:
    """Return every instance that `quantize_e4m3` can launch."""
    return [quantize_source(vectors, per_token, arch) for vectors in _VECTORS for per_token in (True, False)]


def quantize_e4m3(
    x: torch.Tensor,
    granularity: str,
    *,
    out: torch.Tensor | None = None,
    out_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise rows to E4M3; on a CPU, or for another dtype than BF16, `formats.quantize_e4m3` does the same.

    Args:
        x: `[num_tokens, columns]`, BF16 for the kernel; columns a multiple of 8, at most 16384; rows may be strided.
        granularity: "token" (one scale per row) or "block128" (one per 128 columns, the last may be short).
        out: `[num_tokens, columns]` float8_e4m3fn with unit column stride and rows aligned to 8 bytes, or None.
        out_scale: FP32 `[num_tokens]` or `[num_tokens, ceil(columns / 128)]`, or None.

    Returns:
        The E4M3 values and the FP32 scales; `x ~= values * scale`.

    Raises:
        ValueError: a shape, dtype or stride outside the above.
    """
    if granularity not in ("token", "block128"):
        raise ValueError(f"granularity: must be 'token' or 'block128', got '{granularity}'")
    if x.dim() != 2:
        raise ValueError(f"x: must be [num_tokens, columns], got shape {list(x.shape)}")
    num_tokens, columns = x.shape
    scale_shape = (num_tokens,) if granularity == "token" else (num_tokens, -(-columns // 128))
    if out is not None and (out.shape != x.shape or out.dtype != torch.float8_e4m3fn or out.device != x.device):
        raise ValueError(f"out: must be float8_e4m3fn {list(x.shape)} on {x.device}, got {out.dtype} {list(out.shape)}")
    if out_scale is not None and (tuple(out_scale.shape) != scale_shape or out_scale.dtype != torch.float32):
        got = f"{out_scale.dtype} {list(out_scale.shape)}"
        raise ValueError(f"out_scale: must be float32 {list(scale_shape)}, got {got}")
    if not x.is_cuda or x.dtype != torch.bfloat16:
        values, scales = formats.quantize_e4m3(x, granularity)
        return (
            values if out is None else out.copy_(values),
            scales if out_scale is None else out_scale.copy_(scales),
        )
    if columns % 8 or not 0 < columns <= _MAX_COLUMNS:
        raise ValueError(f"x: columns must be a multiple of 8 from 8 to {_MAX_COLUMNS}, got {columns}")
    if x.stride(1) != 1 or x.stride(0) % 8 or x.data_ptr() % 16:
        x = x.contiguous()
        if x.data_ptr() % 16:
            x = x.clone()
    values = torch.empty_like(x, dtype=torch.float8_e4m3fn) if out is None else out
    scales = torch.empty(scale_shape, dtype=torch.float32, device=x.device) if out_scale is None else out_scale
    if values.stride(1) != 1 or values.stride(0) % 8 or values.data_ptr() % 8:
        raise ValueError(f"out: needs unit column stride and rows aligned to 8 bytes, got strides {values.stride()}")
    if granularity == "block128" and scales.stride(1) != 1:
        raise ValueError(f"out_scale: needs unit stride along the blocks, got strides {scales.stride()}")
    if num_tokens == 0:
        return values, scales
    vectors = next(v for v in _VECTORS if _THREADS * v * 8 >= columns)
    kernel = load(quantize_source(vectors, granularity == "token"), x.device.index)
    kernel(
        torch.cuda.current_stream(x.device).cuda_stream,
        num_tokens,
        _THREADS,
        x.data_ptr(),
        ctypes.c_longlong(2 * x.stride(0)),
        values.data_ptr(),
        ctypes.c_longlong(values.stride(0)),
        scales.data_ptr(),
        ctypes.c_longlong(scales.stride(0)),
        ctypes.c_int(columns // 8),
    )
    return values, scales
