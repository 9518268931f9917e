"""The two kernels that the unfused layer needs beside quantiser and grouped GEMMs; on a CPU torch does the same.

h, scale = activate_quantise(sums, limit)   # between the two GEMMs
y = weighted_sum(slots, places, weights)    # behind the way back
"""

from __future__ import annotations

import ctypes
import math
from functools import lru_cache

import torch
from torch import Tensor

from megamoe.kernels import formats
from megamoe.kernels.activation import activate
from megamoe.kernels.jit import KernelSource, load

__all__ = ["activate_quantise", "unfused_sources", "weighted_sum"]

_THREADS = 256

_ACTIVATE = f"""#include "megamoe/impls/quantize_e4m3.cuh"
// One block a row: gate and up columns, BF16 -> E4M3 with a scale per 128 columns; 16 lanes own a block of 128.
extern "C" __global__ void __launch_bounds__({_THREADS})
unfused_activate(const megamoe::Bf16x8* sums, uint2* h, float* scale, long long scale_stride, int vectors,
                 float limit) {{
    using namespace megamoe;
    const long long row = blockIdx.x;
    const Bf16x8* gates = sums + row * 2 * vectors;
    for (int first = threadIdx.x / 32 * 32; first < vectors; first += {_THREADS}) {{
        const int v = first + threadIdx.x % 32;
        float value[8], amax = 0.f;
        for (int i = 0; i < 8; ++i) value[i] = 0.f;
        if (v < vectors) {{
            const Bf16x8 gate = gates[v], up = gates[vectors + v];
#pragma unroll
            for (int i = 0; i < 8; ++i) {{
                const unsigned int g = gate.word[i / 2], u = up.word[i / 2];
                const float a = fminf(i % 2 ? bf16_high(g) : bf16_low(g), limit);
                const float b = fminf(fmaxf(i % 2 ? bf16_high(u) : bf16_low(u), -limit), limit);
                value[i] = __fdividef(a, 1.f + __expf(-a)) * b;
                amax = fmaxf(amax, fabsf(value[i]));
            }}
        }}
        for (int d = 8; d > 0; d /= 2) amax = fmaxf(amax, __shfl_xor_sync(0xffffffffu, amax, d));
        if (v >= vectors) continue;
        const float block_scale = e4m3_scale(amax), inverse = __fdiv_rn(1.0f, block_scale);
        if (v % 16 == 0) scale[v / 16 * scale_stride + row] = block_scale;
        unsigned int packed[2];
#pragma unroll
        for (int i = 0; i < 2; ++i)
            packed[i] = ptx::cvt_e4m3x2(value[4 * i] * inverse, value[4 * i + 1] * inverse) |
                        ptx::cvt_e4m3x2(value[4 * i + 2] * inverse, value[4 * i + 3] * inverse) << 16;
        h[row * vectors + v] = make_uint2(packed[0], packed[1]);
    }}
}}
"""

_SUM = f"""#include "megamoe/impls/quantize_e4m3.cuh"
__device__ __forceinline__ unsigned int bf16x2(float low, float high) {{
    unsigned int v;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
    return v;
}}
// One block a token: the rows of its choices times their weights, in the order of the choices.
extern "C" __global__ void __launch_bounds__({_THREADS})
unfused_sum(const megamoe::Bf16x8* slots, const long long* places, const float* weights, megamoe::Bf16x8* y, int top_k,
            int vectors) {{
    using namespace megamoe;
    const long long token = blockIdx.x;
    for (int v = threadIdx.x; v < vectors; v += {_THREADS}) {{
        float sum[8];
        for (int i = 0; i < 8; ++i) sum[i] = 0.f;
        for (int k = 0; k < top_k; ++k) {{
            const Bf16x8 row = slots[places[token * top_k + k] * vectors + v];
            const float weight = weights[token * top_k + k];
#pragma unroll
            for (int i = 0; i < 8; ++i)
                sum[i] += weight * (i % 2 ? bf16_high(row.word[i / 2]) : bf16_low(row.word[i / 2]));
        }}
        Bf16x8 out;
#pragma unroll
        for (int i = 0; i < 4; ++i) out.word[i] = bf16x2(sum[2 * i], sum[2 * i + 1]);
        y[token * vectors + v] = out;
    }}
}}
"""


@lru_cache
def unfused_sources(arch: str = "sm_90a") -> tuple[KernelSource, KernelSource]:
    """Return both kernels."""
    activate_source = KernelSource(name="unfused_activate", code=_ACTIVATE, entry="unfused_activate", arch=arch)
    return activate_source, KernelSource(name="unfused_sum", code=_SUM, entry="unfused_sum", arch=arch)


def activate_quantise(sums: Tensor, limit: float | None) -> tuple[Tensor, Tensor]:
    """Return E4M3 of silu(gate) * up, with gate and up clamped where there is a limit.

    Args:
        sums: BF16 `[rows, 2 * I]`, gate columns first; I a multiple of 128.
        limit: of the clamps, or None.

    Returns:
        E4M3 `[rows, I]` and FP32 scales `[rows, I / 128]`, which lie as the grouped GEMM reads them: row by row.
    """
    rows, columns = sums.shape[0], sums.shape[1] // 2
    if not sums.is_cuda:
        activation = "silu" if limit is None else "swiglu_clamp"
        gate, up = sums.tensor_split(2, dim=-1)
        return formats.quantize_e4m3(activate(gate, up, activation=activation, limit=limit, alpha=None), "block128")
    h = torch.empty(rows, columns, dtype=torch.float8_e4m3fn, device=sums.device)
    scale = torch.empty(columns // 128, -(-rows // 4) * 4, device=sums.device)
    if rows:
        load(unfused_sources()[0], sums.device.index)(
            torch.cuda.current_stream().cuda_stream,
            rows,
            _THREADS,
            sums.data_ptr(),
            h.data_ptr(),
            scale.data_ptr(),
            ctypes.c_longlong(scale.stride(0)),
            ctypes.c_int(columns // 8),
            ctypes.c_float(math.inf if limit is None else limit),
        )
    return h, scale.t()[:rows]


def weighted_sum(slots: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    """Return the sum over a token's choices, in their order, in FP32.

    Args:
        slots: BF16 `[rows, H]`; H a multiple of 8.
        places: int64 `[tokens, top_k]`, the row of every choice.
        weights: FP32 `[tokens, top_k]`.

    Returns:
        BF16 `[tokens, H]`.
    """
    tokens, top_k = places.shape
    if not slots.is_cuda:
        total = torch.zeros(tokens, slots.shape[1])
        for k in range(top_k):
            total += weights[:, k : k + 1] * slots[places[:, k]].float()
        return total.to(torch.bfloat16)
    y = torch.empty(tokens, slots.shape[1], dtype=torch.bfloat16, device=slots.device)
    load(unfused_sources()[1], slots.device.index)(
        torch.cuda.current_stream().cuda_stream,
        tokens,
        _THREADS,
        slots.data_ptr(),
        places.data_ptr(),
        weights.data_ptr(),
        y.data_ptr(),
        ctypes.c_int(top_k),
        ctypes.c_int(slots.shape[1] // 8),
    )
    return y
