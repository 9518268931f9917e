"""Top-k over rows of logits: the columns of the k largest in each row's window.

On CUDA tensors one SM90 kernel runs (`impls/sm90_topk.cuh`); on CPU tensors torch sorts. Both choose the same set.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from megamoe.kernels.jit import KernelSource
from megamoe.kernels.mqa_checks import check_tensors, whole_number
from megamoe.kernels.packed_launch import launch_packed

__all__ = ["MAX_TOPK", "MAX_TOPK_COLUMNS", "TopkInstance", "check_k", "topk_indices", "topk_sources"]

MAX_TOPK = 2048
MAX_TOPK_COLUMNS = 1 << 24  # a column is exact in FP32
_VALUES = {torch.float32: ("float", 4), torch.bfloat16: ("Bf16", 2)}  # C++ name, vectors of 16 bytes in flight
_CLUSTER, _MAX_SHARED_ROWS, _MIN_SHARED_COLUMNS = 8, 16, 65536  # measured on H200 (benchmarks/notes/topk.md)
_ARGS = struct.Struct("<5Q2q2i")  # TopkArgs of impls/sm90_topk.cuh


@dataclass(frozen=True)
class TopkInstance:
    """One compiled form of the kernel.

    Attributes:
        dtype: of the logits.
        cluster: blocks that share a row.
        ordered: whether indices come in ascending order.
        threads, vectors, capacity, blocks: threads of a block, 16-byte loads in flight of each, candidates that fit
            into its shared memory, blocks that an SM should hold.
    """

    dtype: torch.dtype
    cluster: int
    ordered: bool
    threads: int = 512
    vectors: int = 4
    capacity: int = 6144
    blocks: int = 3

    @property
    def name(self) -> str:
        """Name of the kernel."""
        dtype = "fp32" if self.dtype == torch.float32 else "bf16"
        return f"sm90_topk_{dtype}_cluster{self.cluster}{'_ordered' if self.ordered else ''}"

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block: candidates, histogram, sums of the warps, a bin, three counts."""
        return 8 * self.capacity + 4 * 2048 + 256 + 24

    def source(self, arch: str = "sm_90a") -> KernelSource:
        """Return the kernel's source."""
        value, _ = _VALUES[self.dtype]
        code = f"""#include "megamoe/impls/sm90_topk.cuh"
extern "C" __global__ void __cluster_dims__({self.cluster}, 1, 1) __launch_bounds__({self.threads}, {self.blocks})
{self.name}(const __grid_constant__ megamoe::impls::TopkArgs args) {{
    extern __shared__ __align__(16) unsigned char storage[];
    using namespace megamoe::impls;
    constexpr int kThreads = {self.threads}, kVectors = {self.vectors}, kCapacity = {self.capacity};
    constexpr int kCluster = {self.cluster};
    constexpr bool kOrdered = {str(self.ordered).lower()};
    static_assert(sizeof(TopkShared<kCapacity>) == {self.shared_bytes}, "what the launch asks for");
    static_assert(sizeof(TopkArgs) == {_ARGS.size}, "what the host packs");
    sm90_topk<{value}, kThreads, kVectors, kCapacity, kCluster, kOrdered>(args, storage);
}}
"""
        return KernelSource(self.name, code, self.name, arch, self.shared_bytes)


_CLUSTERS = (1, _CLUSTER)


def topk_sources(arch: str = "sm_90a") -> list[KernelSource]:
    """Return every instance that `topk_indices` can launch."""
    return [
        select_instance(dtype, cluster, ordered).source(arch)
        for dtype in _VALUES
        for cluster in _CLUSTERS
        for ordered in (False, True)
    ]


@lru_cache
def select_instance(dtype: torch.dtype, cluster: int, ordered: bool) -> TopkInstance:
    """Return the instance for rows of a dtype, shared by `cluster` blocks each."""
    # as many blocks as leave each thread the registers that it needs
    blocks = 1 if cluster > 1 else 3 if dtype == torch.float32 and not ordered else 2
    return TopkInstance(dtype, cluster, ordered, vectors=_VALUES[dtype][1], blocks=blocks)


def topk_indices(
    logits: Tensor,
    k: int,
    starts: Tensor | None = None,
    ends: Tensor | None = None,
    *,
    deterministic: bool = False,
    shifts: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return the columns of the k largest logits in each row's window [start, end).

    A window is cut to the row; an empty one is legal. -inf is never chosen: it marks what is masked. NaN of either sign
    is the largest, 0 and -0 are equal, and of equal logits those in lower columns are chosen, so the set is the same in
    every run. A row's columns come first, then -1 for each that its window lacks.

    Args:
        logits: `[S, N]`, FP32 or BF16, N up to 2^24; rows may be strided, with other column strides they are copied.
        k: 1 to 2048.
        starts: int32 `[S]`, first column of each window, or None: 0.
        ends: int32 `[S]`, end of each window, or None: N.
        deterministic: whether columns ascend within a row; otherwise their order differs from run to run.
        shifts: int32 `[S]`, added to every column of a row, or None. Columns count from the row's first one, not from
            its start: with `-starts` they count from there.
        out: int32 `[S, k]` with unit column stride, or None.

    Returns:
        int32 `[S, k]`.

    Raises:
        ValueError: a dtype, shape, stride or device outside the above; the message names the rule.
    """
    check_tensors(logits=logits)
    if logits.dim() != 2 or logits.dtype not in _VALUES or logits.shape[1] > MAX_TOPK_COLUMNS:
        raise ValueError(
            f"logits: must be float32 or bfloat16 [S, N] with N <= {MAX_TOPK_COLUMNS}, "
            f"got {logits.dtype} {list(logits.shape)}"
        )
    k = check_k(k)
    num_rows, num_columns = logits.shape
    for name, vector in (("starts", starts), ("ends", ends), ("shifts", shifts)):
        _check_vector(name, vector, num_rows, logits.device)
    if out is None:
        out = torch.empty((num_rows, k), dtype=torch.int32, device=logits.device)
    else:
        check_tensors(out=out)
    if out.dtype != torch.int32 or out.shape != (num_rows, k) or out.device != logits.device or out.stride(1) != 1:
        raise ValueError(
            f"out: must be int32 [{num_rows}, {k}] with unit column stride on {logits.device}, "
            f"got {out.dtype} {list(out.shape)} with strides {out.stride()} on {out.device}"
        )
    if num_rows == 0:
        return out
    if num_columns == 0:
        return out.fill_(-1)
    if not logits.is_cuda:
        return _topk_by_torch(logits, k, starts, ends, shifts, out)
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    # where rows are too few to fill the device, blocks share them
    cluster = _CLUSTER if num_rows <= _MAX_SHARED_ROWS and num_columns >= _MIN_SHARED_COLUMNS else 1
    _launch(select_instance(logits.dtype, cluster, deterministic), logits, k, starts, ends, shifts, out)
    return out


def _launch(
    instance: TopkInstance,
    logits: Tensor,
    k: int,
    starts: Tensor | None,
    ends: Tensor | None,
    shifts: Tensor | None,
    out: Tensor,
) -> None:
    addresses = (logits, out, starts, ends, shifts)
    launch_packed(
        instance, instance.source, logits.device.index, logits.shape[0] * instance.cluster, instance.threads, _ARGS,
        (
            *(0 if tensor is None else tensor.data_ptr() for tensor in addresses),
            *(logits.stride(0), out.stride(0), logits.shape[1], k),
        ),
    )  # fmt: skip


def check_k(k: int) -> int:
    """Return k, refusing what the kernel does not find."""
    k = whole_number("k", k)
    if not 1 <= k <= MAX_TOPK:
        raise ValueError(f"k: must be from 1 to {MAX_TOPK}, got {k}")
    return k


def _check_vector(name: str, vector: Tensor | None, num_rows: int, device: torch.device) -> None:
    if vector is None:
        return
    check_tensors(**{name: vector})
    fits = vector.dtype == torch.int32 and vector.shape == (num_rows,) and vector.device == device
    if not fits or not vector.is_contiguous():
        raise ValueError(
            f"{name}: must be contiguous int32 [{num_rows}] on {device}, "
            f"got {vector.dtype} {list(vector.shape)} with strides {vector.stride()} on {vector.device}"
        )


_INT32_MAX = (1 << 31) - 1
_PART = 1 << 22  # logits that the torch form handles at a time


def _topk_by_torch(
    logits: Tensor, k: int, starts: Tensor | None, ends: Tensor | None, shifts: Tensor | None, out: Tensor
) -> Tensor:
    """The same choice by torch: the largest of (order of the value, lower column first) as one 64-bit number."""
    num_rows, num_columns = logits.shape
    columns = torch.arange(num_columns, device=logits.device)
    width = min(k, num_columns)
    step = max(1, _PART // num_columns)
    for first in range(0, num_rows, step):
        rows = slice(first, first + step)
        values = logits[rows].float() + 0.0  # -0 becomes 0
        bits = values.view(torch.int32)
        order = torch.where(bits < 0, bits ^ _INT32_MAX, bits).masked_fill_(values.isnan(), _INT32_MAX)
        chosen = values != -torch.inf
        if starts is not None:
            chosen &= columns >= starts[rows, None]
        if ends is not None:
            chosen &= columns < ends[rows, None]
        keys = (order.long() << 32) + (_INT32_MAX - columns)
        keys.masked_fill_(~chosen, -(1 << 63))
        best = keys.topk(width, dim=1).values
        found = _INT32_MAX - (best & 0xFFFFFFFF)
        found = torch.where(best == -(1 << 63), num_columns, found).sort(dim=1).values
        is_missing = found == num_columns
        if shifts is not None:
            found += shifts[rows, None]
        part = out[rows]
        part[:, :width] = found.masked_fill_(is_missing, -1)
        part[:, width:] = -1
    return out
