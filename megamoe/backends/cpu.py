"""The C++ engine as a backend of the MoE op: threads and shared memory, for ranks of one host without a GPU.

Weights that come packed (`layout`) are used as they are. Canonical ones are packed on first sight, and the packed copy
is used until a tensor changes. A gradient is recomputed by the reference backend, whose rounding points are the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from megamoe.backends.base import Backend, BackendSetup, Gradients
from megamoe.backends.reference import ReferenceBackend
from megamoe.backends.sharing import PackedCache, SharedWorkspaces
from megamoe.config import MoESpec
from megamoe.kernels.cpu_engine import why_missing
from megamoe.kernels.packed import CpuLayout, PackedExperts, as_packed, pack_experts
from megamoe.kernels.weights import ExpertWeights
from megamoe.workspace import Workspace

__all__ = ["BACKEND", "CpuBackend"]

_NAMES = ("w13", "w2", "w13_scale", "w2_scale", "b13", "b2")
_INPUTS = (torch.float32, torch.bfloat16)

_shared: SharedWorkspaces[Workspace] = SharedWorkspaces()


class CpuBackend(Backend):
    """See the module's docstring."""

    name = "cpu"
    differentiable = True
    layout = CpuLayout()

    @classmethod
    def unavailable(cls, spec: MoESpec, device: torch.device, world_size: int) -> str | None:
        if device.type != "cpu":
            return f"it runs on the CPU, the tensors are on {device}"
        if spec.top_k > 16:
            return f"top_k must be at most 16, got {spec.top_k}"
        return why_missing()

    def __init__(self, setup: BackendSetup) -> None:
        self.setup = setup
        self.spec = setup.spec
        self.workspace = setup.workspace
        if self.workspace is None:
            self.workspace = _shared.get(setup, lambda: _make_workspace(setup))
        if not self.workspace.serves(self.spec, setup.max_tokens_per_rank):
            raise ValueError(
                "workspace: too small for this layer, or made for another parallel.max_tokens_per_rank; "
                "construct it with the specs of all layers"
            )
        self._cache: PackedCache[PackedExperts] = PackedCache(self.name)
        self._biases: PackedCache[Tensor] = PackedCache(self.name)
        self._reference: ReferenceBackend | None = None

    def forward(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, experts: ExpertWeights) -> Tensor:
        packed = self.packed(experts)
        rows = x if x.dtype in _INPUTS else x.float()
        y = self.workspace.run(
            rows.detach().contiguous(),
            topk_ids.contiguous(),
            topk_weights.detach().contiguous(),
            packed,
            overflow=self.setup.overflow,
            check=self.setup.check,
        )
        return y if y.dtype == x.dtype else y.to(x.dtype)

    def backward(
        self,
        grad: Tensor,
        x: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        experts: ExpertWeights,
        needed: Sequence[bool],
    ) -> Gradients:
        if self._reference is None:
            self._reference = ReferenceBackend(self.setup)
        return self._reference.backward(grad, x, topk_ids, topk_weights, experts, needed)

    def packed(self, experts: ExpertWeights) -> PackedExperts:
        """Return experts as the engine takes them; canonical ones are packed anew when a tensor has changed since."""
        if experts.packed:
            self._cache.forget_expired()
            b13, b2 = self._float_bias(experts.b13), self._float_bias(experts.b2)
            return as_packed(dataclasses.replace(experts, b13=b13, b2=b2), self.spec)
        tensors = [t for t in (getattr(experts, name) for name in _NAMES) if t is not None]
        return self._cache.get(tensors, lambda: pack_experts(experts, self.spec))

    def _float_bias(self, bias: Tensor | None) -> Tensor | None:
        """Return a bias in FP32; a converted copy is kept until the bias changes."""
        if bias is None or (bias.dtype == torch.float32 and bias.is_contiguous()):
            return bias
        return self._biases.get([bias], lambda: bias.detach().float().contiguous())

    def close(self) -> None:
        self._cache.clear()
        self._biases.clear()


def _make_workspace(setup: BackendSetup) -> Workspace:
    return Workspace([setup.spec], setup.collectives, max_tokens_per_rank=setup.max_tokens_per_rank, comm=setup.comm)


BACKEND = CpuBackend
