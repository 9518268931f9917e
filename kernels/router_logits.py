"""The router's logits of a few tokens: `routing.router_logits` on Hopper in one launch.

Errors are those of FP32 sums. A token's logits depend neither on the number of tokens nor on the other ones.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from megamoe.kernels.jit import KernelSource
from megamoe.kernels.packed_launch import launch_packed

__all__ = ["MAX_TOKENS", "RouterLogitsInstance", "router_logits", "router_logits_sources", "takes_logits"]

MAX_TOKENS = 256  # beyond it cuBLAS is as fast or faster (H200, 128 to 384 experts)
_WARPS, _CLUSTER, _EXPERTS = 8, 8, 16  # of a block, blocks, experts of a cluster
_STEP = 32  # columns of hidden
_MAX_STEPS = {1: 4, 4: 2}  # by tiles: what leaves no weights in local memory
_TILES = (1, 4)  # of 8 tokens
_ALIGNMENT = 16
_ARGS = struct.Struct("<4Qq4i")  # RouterLogitsArgs of impls/sm90_router_logits.cuh
_WEIGHTS = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class RouterLogitsInstance:
    """One compiled form of the kernel.

    Attributes:
        fp32: whether the weight is FP32; BF16 otherwise.
        tiles: of 8 tokens that a cluster takes.
        steps: of 32 columns whose weights a warp loads at once.
    """

    fp32: bool
    tiles: int
    steps: int

    @property
    def name(self) -> str:
        """Name of the kernel."""
        return f"sm90_router_logits_{'fp32' if self.fp32 else 'bf16'}_t{8 * self.tiles}_s{self.steps}"

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block: sums of the warps, sums of the block."""
        return 4 * 8 * self.tiles * (_WARPS * (_EXPERTS + 4) + _EXPERTS)

    def source(self, arch: str = "sm_90a") -> KernelSource:
        """Return the kernel's source."""
        code = f"""#include "megamoe/impls/sm90_router_logits.cuh"
extern "C" __global__ void __cluster_dims__({_CLUSTER}, 1, 1) __launch_bounds__({32 * _WARPS}, 2)
{self.name}(const __grid_constant__ megamoe::impls::RouterLogitsArgs args) {{
    extern __shared__ __align__(16) unsigned char storage[];
    using namespace megamoe::impls;
    constexpr bool kFp32 = {str(self.fp32).lower()};
    constexpr int kTiles = {self.tiles}, kWarps = {_WARPS}, kCluster = {_CLUSTER}, kSteps = {self.steps};
    static_assert(router_logits::kExperts == {_EXPERTS} && router_logits::kK == {_STEP}, "what the grid is made for");
    static_assert(sizeof(RouterLogitsShared<kTiles, kWarps>) == {self.shared_bytes}, "what the launch asks for");
    static_assert(sizeof(RouterLogitsArgs) == {_ARGS.size}, "what the host packs");
    sm90_router_logits<kFp32, kTiles, kWarps, kCluster, kSteps>(args, storage);
}}
"""
        return KernelSource(self.name, code, self.name, arch, self.shared_bytes)


@lru_cache
def _select(fp32: bool, few: bool, hidden: int) -> RouterLogitsInstance:
    tiles, steps = _TILES[0 if few else 1], -(-hidden // (_STEP * _WARPS * _CLUSTER))
    return RouterLogitsInstance(fp32, tiles, min(steps, _MAX_STEPS[tiles]))


def router_logits_sources(
    hidden: int, weight_dtype: torch.dtype = torch.float32, arch: str = "sm_90a"
) -> list[KernelSource]:
    """Return every instance that `router_logits` can launch for a router."""
    fp32 = weight_dtype == torch.float32
    return [_select(fp32, few, hidden).source(arch) for few in (True, False)]


def takes_logits(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Return whether `router_logits` takes these CUDA tensors, and is faster than torch.

    x: BF16 `[num_tokens, hidden]` with unit column stride; weight `[num_experts, hidden]` and bias `[num_experts]` of
    one type, FP32 or BF16, contiguous; hidden a multiple of 8, rows aligned to 16 bytes.
    """
    num_tokens, hidden = x.shape
    if num_tokens > MAX_TOKENS or x.dtype != torch.bfloat16 or weight.dtype not in _WEIGHTS or hidden % 8:
        return False
    if not weight.is_contiguous() or (x.data_ptr() | weight.data_ptr()) % _ALIGNMENT:
        return False
    if x.stride(1) != 1 or x.stride(0) % 8:
        return False
    return bias is None or (bias.dtype == weight.dtype and bias.is_contiguous())


def router_logits(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `routing.router_logits` of tensors for which `takes_logits` is true; carries no gradient.

    Args:
        x: tokens `[num_tokens, hidden]`.
        weight: `[num_experts, hidden]`.
        bias: optional logit bias `[num_experts]`.

    Returns:
        FP32 `[num_tokens, num_experts]`.
    """
    (num_tokens, hidden), num_experts = x.shape, weight.shape[0]
    logits = torch.empty(num_tokens, num_experts, dtype=torch.float32, device=x.device)
    if num_tokens == 0:
        return logits
    instance = _select(weight.dtype == torch.float32, num_tokens <= 8 * _TILES[0], hidden)
    groups = -(-num_tokens // (8 * instance.tiles))
    launch_packed(
        instance, instance.source, x.device.index, _CLUSTER * groups * -(-num_experts // _EXPERTS), 32 * _WARPS, _ARGS,
        (
            *(x.data_ptr(), weight.data_ptr(), 0 if bias is None else bias.data_ptr(), logits.data_ptr()),
            *(x.stride(0), num_tokens, num_experts, hidden, groups),
        ),
    )  # fmt: skip
    return logits
