"""The C++ engine as a backend of the MoE op: threads and shared memory, for ranks of one host without a GPU.

Weights that come packed (`layout`) are used as they are. Canonical ones are packed on first sight, and the packed copy
is used until a tensor changes. A gradient is recomputed by the reference backend, whose rounding points are the same.
"""

from __future__ import annotations

import dataclasses
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
from megamoe.kernels.packed import CpuLayout, PackedExperts, as_packed, pack_experts
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


@dataclass
class _Bias:
    """A bias in FP32, and how to see that the one it was made of is still the same."""

    storage: StorageWeakRef
    version: int
    values: Tensor


# workspaces that contexts without one of their own share: (group, bound, comm) -> living workspaces
_shared: dict[tuple[object, int, str], weakref.WeakSet[Workspace]] = {}


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
        self.workspace = setup.workspace if setup.workspace is not None else _shared_workspace(setup)
        if not self.workspace.serves(self.spec, setup.max_tokens_per_rank):
            raise ValueError(
                "workspace: too small for this layer, or made for another parallel.max_tokens_per_rank; "
                "construct it with the specs of all layers"
            )
        self._cache: dict[tuple[int, ...], _Cached] = {}
        self._biases: dict[int, _Bias] = {}
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
            if self._cache:
                self._forget_expired()
            b13, b2 = self._float_bias(experts.b13), self._float_bias(experts.b2)
            return as_packed(dataclasses.replace(experts, b13=b13, b2=b2), self.spec)
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

    def _float_bias(self, bias: Tensor | None) -> Tensor | None:
        """Return a bias in FP32; a converted copy is kept until the bias changes."""
        if bias is None or (bias.dtype == torch.float32 and bias.is_contiguous()):
            return bias
        key, version = bias.data_ptr(), _version(bias)
        kept = self._biases.get(key)
        if kept is None or version == _UNCOUNTED or kept.version != version or kept.storage.expired():
            self._forget_expired()
            kept = _Bias(StorageWeakRef(bias.untyped_storage()), version, bias.detach().float().contiguous())
            self._biases[key] = kept
        return kept.values

    def _forget_expired(self) -> None:
        for key in [k for k, c in self._cache.items() if any(s.expired() for s in c.storages)]:
            del self._cache[key]
        for address in [a for a, b in self._biases.items() if b.storage.expired()]:
            del self._biases[address]

    def close(self) -> None:
        self._cache.clear()
        self._biases.clear()


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
