"""The C++ engine as a backend of the MoE op: threads and shared memory, for ranks of one host without a GPU.

Weights come in the canonical layout and are packed on first sight; the packed copy is used until a tensor changes.
`pack_in_place` lets the packed bytes take the place of the canonical ones. A gradient is recomputed by the reference
backend, whose rounding points are the same.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from megamoe.backends.base import Backend, BackendSetup, Gradients
from megamoe.backends.reference import ReferenceBackend
from megamoe.config import MoESpec
from megamoe.kernels.cpu_engine import why_missing
from megamoe.kernels.packed import PackedExperts, can_pack_in_place, pack_experts, unpack_experts
from megamoe.kernels.weights import ExpertWeights
from megamoe.workspace import Workspace

__all__ = ["BACKEND", "CpuBackend"]

_NAMES = ("w13", "w2", "w13_scale", "w2_scale", "b13", "b2")
_INPUTS = (torch.float32, torch.bfloat16)
_UNCOUNTED = -1


@dataclass
class _Cached:
    """Packed experts, and how to see that the tensors they were made of are still the same."""

    storages: list[StorageWeakRef]
    versions: list[int]
    packed: PackedExperts

    def fits(self, versions: list[int]) -> bool:
        if _UNCOUNTED in versions:
            return False
        return versions == self.versions and not any(storage.expired() for storage in self.storages)


# workspaces that contexts without one of their own share: (group, bound, comm) -> living workspaces
_shared: dict[tuple[object, int, str], weakref.WeakSet[Workspace]] = {}


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
        self.workspace = setup.workspace if setup.workspace is not None else _shared_workspace(setup)
        if not self.workspace.serves(self.spec, setup.max_tokens_per_rank):
            raise ValueError(
                "workspace: too small for this layer, or made for another parallel.max_tokens_per_rank; "
                "construct it with the specs of all layers"
            )
        self._cache: dict[tuple[int, ...], _Cached] = {}
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
        key = tuple(tensor.data_ptr() for tensor in tensors)
        versions = [_version(tensor) for tensor in tensors]
        cached = self._cache.get(key)
        if cached is None or not cached.fits(versions):
            if cached is not None and _UNCOUNTED in versions:
                _warn_uncounted()
            self._forget_expired()
            cached = _Cached(_storages(tensors), versions, pack_experts(experts, self.spec))
            self._cache[key] = cached
        return cached.packed

    def pack_in_place(self, experts: ExpertWeights) -> bool:
        """Replace the canonical bytes by the packed ones in the tensors' own memory, where the sizes allow it.

        Until `unpacked` is asked for the canonical form, the tensors must not be read or written elsewhere.

        Returns:
            Whether it was done; without it a packed copy is kept beside the canonical tensors.
        """
        tensors = [t for t in (getattr(experts, name) for name in _NAMES) if t is not None]
        if not can_pack_in_place(self.spec, experts.w13.dtype) or any(t.is_inference() for t in tensors):
            return False
        packed = pack_experts(experts, self.spec, in_place=True)
        key = tuple(tensor.data_ptr() for tensor in tensors)
        self._cache[key] = _Cached(_storages(tensors), [_version(tensor) for tensor in tensors], packed)
        return True

    def unpacked(self, experts: ExpertWeights) -> ExpertWeights:
        """Return canonical copies of experts that were packed in place, byte for byte."""
        return unpack_experts(self.packed(experts))

    def _forget_expired(self) -> None:
        for key in [k for k, c in self._cache.items() if any(s.expired() for s in c.storages)]:
            del self._cache[key]

    def close(self) -> None:
        self._cache.clear()


def _version(tensor: Tensor) -> int:
    # a tensor made under inference_mode keeps no count of its changes
    return _UNCOUNTED if tensor.is_inference() else tensor._version


@functools.cache
def _warn_uncounted() -> None:
    warnings.warn(
        "backend cpu packs these weights again in every call, because tensors made under torch.inference_mode do not "
        "tell when they change; make them outside of it",
        RuntimeWarning,
        stacklevel=2,
    )


def _storages(tensors: list[Tensor]) -> list[StorageWeakRef]:
    return [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors]


def _shared_workspace(setup: BackendSetup) -> Workspace:
    """Return a living workspace of this group that serves the layer, or a new one. The same choice on every rank."""
    group = setup.collectives.group.process_group
    key = (group, setup.max_tokens_per_rank, setup.comm)
    living = _shared.setdefault(key, weakref.WeakSet())
    fitting = [w for w in living if w.serves(setup.spec, setup.max_tokens_per_rank)]
    # ranks drop layers at their own time: an old workspace is taken only where every rank still has it
    ids = setup.collectives.gather_objects(sorted(w.serial for w in fitting), phase="construction of the workspace")
    common = set(ids[0]).intersection(*ids[1:])
    for workspace in fitting:
        if workspace.serial == min(common, default=None):
            return workspace
    workspace = Workspace(
        [setup.spec], setup.collectives, max_tokens_per_rank=setup.max_tokens_per_rank, comm=setup.comm
    )
    living.add(workspace)
    return workspace


BACKEND = CpuBackend
