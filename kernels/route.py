"""The routing kernel: logits -> ids, weights and counts in one launch on Hopper, by the maths of `kernels.routing`.

Ids are those of `routing.choose_experts` but where two keys are closer than the last bit of a score, and weights are
within 1e-6 of the exact value, as `routing.routing_weights` promises.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from megamoe.config import RouterConfig
from megamoe.kernels.eager import runs_kernels
from megamoe.kernels.jit import KernelSource
from megamoe.kernels.packed_launch import launch_packed

__all__ = ["RouteShape", "can_route", "route"]

_MAX_WARPS = 4
_SCORES = {"softmax": 0, "topk_softmax": 1, "sigmoid": 2, "sqrtsoftplus": 3}  # RouteScore of impls/sm90_route.cuh
_MAX_EXPERTS, _MAX_TOP_K, _MAX_GROUPS = 1024, 32, 32
_ARGS = struct.Struct("<7Qdq2i")  # RouteArgs of impls/sm90_route.cuh
_ID_DTYPES = (torch.int64, torch.int32)


@dataclass(frozen=True)
class RouteShape:
    """What a routing kernel is compiled for; the fields are arguments of `routing.choose_experts`.

    Attributes:
        correction: whether there is a correction bias.
        hash: whether ids come from a table; groups and correction count for nothing then.
    """

    num_experts: int
    top_k: int
    score: str
    correction: bool
    hash: bool
    groups: int
    topk_groups: int
    group_reduce: str
    renormalize: bool

    @classmethod
    def of(cls, config: RouterConfig, num_experts: int, top_k: int) -> RouteShape:
        """Return the shape of a router of the configuration."""
        by_hash = config.select == "hash"
        return cls(
            num_experts=num_experts,
            top_k=top_k,
            score=config.score,
            correction=config.bias and not by_hash,
            hash=by_hash,
            groups=config.groups,
            topk_groups=config.topk_groups,
            group_reduce=config.group_reduce,
            renormalize=config.renormalize,
        )

    @property
    def fits(self) -> bool:
        """Whether the kernel takes such routers: the limits are those of a warp."""
        return self.num_experts <= _MAX_EXPERTS and self.top_k <= _MAX_TOP_K and self.groups <= _MAX_GROUPS

    @property
    def name(self) -> str:
        """Name of the kernel."""
        return f"sm90_route_e{self.num_experts}_top{self.top_k}_{self.score}{'_hash' if self.hash else ''}"

    @property
    def threads(self) -> int:
        """Threads of a block, which takes one token."""
        return 32 if self.hash else 32 * min(_MAX_WARPS, -(-self.num_experts // 32))

    @property
    def constants(self) -> str:
        """The arguments of the kernel's template `sm90_route`."""
        flags = (self.correction, self.hash, self.group_reduce == "top2", self.renormalize)
        correction, by_hash, top2, renormalize = (str(flag).lower() for flag in flags)
        score = f"static_cast<megamoe::impls::RouteScore>({_SCORES[self.score]})"
        return (
            f"{self.threads // 32}, {self.num_experts}, {self.top_k}, {score}, {correction}, {by_hash}, {self.groups}, "
            f"{self.topk_groups}, {top2}, {renormalize}"
        )

    def source(self, arch: str = "sm_90a") -> KernelSource:
        """Return the kernel's source."""
        code = f"""#include "megamoe/impls/sm90_route.cuh"
extern "C" __global__ void __launch_bounds__({self.threads})
{self.name}(const __grid_constant__ megamoe::impls::RouteArgs args) {{
    static_assert(sizeof(args) == {_ARGS.size}, "what the host packs");
    megamoe::impls::sm90_route<{self.constants}>(args);
}}
"""
        return KernelSource(self.name, code, self.name, arch)


def can_route(shape: RouteShape, device: torch.device) -> bool:
    """Return whether there is a kernel for a router on a device."""
    return shape.fits and runs_kernels(device)


def route(
    shape: RouteShape,
    logits: Tensor,
    correction: Tensor | None,
    scale: float,
    load: Tensor,
    *,
    table: Tensor | None = None,
    input_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose the experts of every token, and count them. Carries no gradient.

    Args:
        shape: for which `can_route` is true on this device.
        logits: FP32 `[num_tokens, num_experts]`, contiguous.
        correction: the correction bias, FP32 `[num_experts]`, with `shape.correction`.
        scale: factor on the weights.
        load: int64 `[num_experts]`; the choices are added.
        table: int64 `[vocab_size, top_k]`, contiguous, with `shape.hash`.
        input_ids: `[num_tokens]` int32 or int64, with `shape.hash`; below `vocab_size`: a larger one ends the kernel
            with an error, as an index does in torch.

    Returns:
        ids int64 and weights FP32, `[num_tokens, top_k]`.
    """
    num_tokens, device = logits.shape[0], logits.device
    ids = torch.empty(num_tokens, shape.top_k, dtype=torch.int64, device=device)
    weights = torch.empty(num_tokens, shape.top_k, dtype=torch.float32, device=device)
    if num_tokens == 0:
        return ids, weights
    is_short = False
    if input_ids is not None:
        if input_ids.dtype not in _ID_DTYPES or not input_ids.is_contiguous():
            input_ids = input_ids.long().contiguous()
        is_short = input_ids.dtype == torch.int32
    tensors = (logits, correction, table, input_ids, ids, weights, load)
    launch_packed(
        shape, shape.source, device.index, num_tokens, shape.threads, _ARGS,
        (
            *(0 if tensor is None else tensor.data_ptr() for tensor in tensors),
            *(scale, 0 if table is None else table.shape[0], num_tokens, is_short),
        ),
    )  # fmt: skip
    return ids, weights
