"""The C++ engine as a backend of the MoE op: threads and shared memory, for ranks of one host without a GPU.

Weights come in the canonical layout and are packed on first sight; the packed copy is used until a tensor changes.
`pack_in_place` lets the packed bytes take the place of the canonical ones. A gradient is recomputed by the reference
backend, whose rounding points are the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megamoe.backends.base import Backend, BackendSetup, Gradients
from megamoe.backends.reference import ReferenceBackend
from megamoe.backends.sharing import PackedCache, SharedWorkspaces
from megamoe.config import MoESpec
from megamoe.kernels.cpu_engine import why_missing
from megamoe.kernels.packed import PackedExperts, can_pack_in_place, pack_experts, unpack_experts
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
        """Return the packed form of canonical experts, made anew when a tensor has changed since."""
        tensors = [t for t in (getattr(experts, name) for name in _NAMES) if t is not None]
        return self._cache.get(tensors, lambda: pack_experts(experts, self.spec))

    def pack_in_place(self, experts: ExpertWeights) -> bool:
        """Replace the canonical bytes by the packed ones in the tensors' own memory, where the sizes allow it.

        Until `unpacked` is asked for the canonical form, the tensors must not be read or written elsewhere.

        Returns:
            Whether it was done; without it a packed copy is kept beside the canonical tensors.
        """
        tensors = [t for t in (getattr(experts, name) for name in _NAMES) if t is not None]
        if not can_pack_in_place(self.spec, experts.w13.dtype) or any(t.is_inference() for t in tensors):
            return False
        self._cache.put(tensors, pack_experts(experts, self.spec, in_place=True))
        return True

    def unpacked(self, experts: ExpertWeights) -> ExpertWeights:
        """Return canonical copies of experts that were packed in place, byte for byte."""
        return unpack_experts(self.packed(experts))

    def close(self) -> None:
        self._cache.clear()


def _make_workspace(setup: BackendSetup) -> Workspace:
    return Workspace([setup.spec], setup.collectives, max_tokens_per_rank=setup.max_tokens_per_rank, comm=setup.comm)


BACKEND = CpuBackend
