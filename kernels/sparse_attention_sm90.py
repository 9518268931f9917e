"""The SM90 kernel of sparse attention: latents of MLA and the rows of DeepSeek-V4."""

from __future__ import annotations

import math
import struct

import torch
from torch import Tensor

from megamoe.kernels.eager import is_eager, runs_kernels
from megamoe.kernels.jit import KernelSource
from megamoe.kernels.packed_launch import launch_packed

__all__ = ["launch_sparse_attention", "sparse_attention_source", "sparse_attention_sources", "takes"]

_THREADS = 384
_HEADS = 64  # of a block
_VALUE = 512
_WIDTHS = (512, 576)
_TILE = 64
_ARGS = struct.Struct("5Q2if4x")


def _shared_bytes(width: int) -> int:
    """Queries and two stages of rows, the mask of both, barriers, a count; and 1024 to align them."""
    used = 3 * _TILE * 2 * width + 2 * 4 * _TILE + 4 * 8 + 4
    return -(-used // 1024) * 1024 + 1024


def sparse_attention_source(width: int, arch: str = "sm_90a") -> KernelSource:
    """Return the kernel for rows of so many elements, of which the first 512 are the value."""
    name = f"sm90_sparse_attention_w{width}"
    code = f"""#include "megamoe/impls/sm90_sparse_attention.cuh"
extern "C" __global__ void __launch_bounds__({_THREADS}, 1)
{name}(const __grid_constant__ megamoe::impls::SparseAttentionArgs args) {{
    extern __shared__ unsigned char storage[];
    using namespace megamoe::impls;
    static_assert(sizeof(SparseShared<{width}>) + 1024 == {_shared_bytes(width)}, "what the launch asks for");
    static_assert(sizeof(SparseAttentionArgs) == {_ARGS.size}, "what the host packs");
    SparseAttention<{width}, {_VALUE}>::run(args, storage);
}}
"""
    return KernelSource(name, code, name, arch, _shared_bytes(width))


def sparse_attention_sources(arch: str = "sm_90a", width: int | None = None) -> list[KernelSource]:
    """Return every instance that `launch_sparse_attention` can launch, or those for rows of one width."""
    return [sparse_attention_source(w, arch) for w in _WIDTHS if width in (None, w)]


def takes(q: Tensor, rows: Tensor, key: tuple[int, int], value: tuple[int, int]) -> bool:
    """Tell whether the kernel runs this problem: BF16 on Hopper, one row head, the value a part of the key.

    Not where a compiler or a tracer follows, nor without what compiles kernels: torch does it there.

    Args:
        q: `[N, H, D]`, H a multiple of 64.
        rows: `[R, 1, W]`, W 512 or 576.
        key, value: where they stand in a row.
    """
    width = rows.shape[2]
    return (
        is_eager(q, rows)
        and q.dtype == torch.bfloat16
        and rows.shape[1] == 1
        and width in _WIDTHS
        and key == (0, width)
        and value == (0, _VALUE)
        and q.shape[1] % _HEADS == 0
        and rows.shape[0] < 1 << 31
        and runs_kernels(q.device)
    )


def launch_sparse_attention(
    q: Tensor, rows: Tensor, index: Tensor, scale: float, sinks: Tensor | None, out: Tensor
) -> None:
    """Write the attention of every query to `out`; the arguments are those of a problem that `takes` accepts.

    Args:
        q: BF16 `[N, H, W]`; rows: BF16 `[R, 1, W]`; index: `[N, K]`; sinks: `[H]` or None; out: BF16 `[N, H, 512]`.
        scale: of the logits.
    """
    queries, heads, width = q.shape
    if queries == 0:
        return
    q, rows, index = _aligned(q), _aligned(rows), index.to(torch.int32).contiguous()
    wide = None if sinks is None else sinks.float().contiguous()
    addresses = (
        q.data_ptr(),
        rows.data_ptr(),
        index.data_ptr(),
        0 if wide is None else wide.data_ptr(),
        out.data_ptr(),
    )
    launch_packed(
        ("sparse attention", width),
        lambda: sparse_attention_source(width),
        q.get_device(),
        queries * (heads // _HEADS),
        _THREADS,
        _ARGS,
        (*addresses, heads, index.shape[1], scale * math.log2(math.e)),
    )


def _aligned(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor that begins at a multiple of 16 bytes: this one where it does."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()
