"""What backends with packed weights have in common: packed forms by their tensors, workspaces that layers share."""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from megamoe.backends.base import BackendSetup

__all__ = ["PackedCache", "SharedWorkspaces"]

_UNCOUNTED = -1
_expired = torch.UntypedStorage._expired  # of StorageWeakRef.expired(), which costs twice as much

P = TypeVar("P")
W = TypeVar("W", bound=Any)


class Cached(Generic[P]):
    """A packed form, and how to see that the tensors it was made of are still the same.

    Attributes:
        packed: the form.
    """

    def __init__(self, tensors: Sequence[Tensor], versions: list[int], packed: P) -> None:
        self.packed = packed
        self._pointers = [tensor.data_ptr() for tensor in tensors]
        self._storages = [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors]
        self._numbers = [storage.cdata for storage in self._storages]
        self.update(versions)

    def update(self, versions: list[int]) -> None:
        """Note that the form is of these versions of the tensors."""
        # no tensor's version is below zero, so those without one are never found unchanged
        self._versions = versions

    def fits(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether these are the tensors, and none has changed."""
        if [tensor.data_ptr() for tensor in tensors] != self._pointers:
            return False
        try:
            if [tensor._version for tensor in tensors] != self._versions:
                return False
        except RuntimeError:  # one made under inference_mode keeps no count of its changes
            return False
        return not self.is_gone()

    def is_gone(self) -> bool:
        """Return whether one of the tensors is no more."""
        return True in [_expired(number) for number in self._numbers]


class PackedCache(Generic[P]):
    """Packed forms by the tensors that they were made of; a tensor that has changed since is packed anew.

    Args:
        backend: name, for a warning.
    """

    def __init__(self, backend: str) -> None:
        self._backend = backend
        self._entries: dict[tuple[int, ...], Cached[P]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, tensors: Sequence[Tensor], pack: Callable[[], P], repack: Callable[[P], None] | None = None) -> P:
        """Return the packed form of tensors, made by `pack` where there is none or a tensor has changed.

        With `repack` the packed form of tensors that have changed is overwritten, so that its addresses stay. torch's
        version count tells of changes; tensors made under `torch.inference_mode` have none, so they are packed in every
        call, and a warning says so once.
        """
        found = self.find(tensors)
        if found is not None:
            return found.packed
        key, versions = _key(tensors), _versions(tensors)
        if key in self._entries and _UNCOUNTED in versions:
            _warn_uncounted(self._backend)
        self.forget_expired()
        # what is left under the key belongs to these very tensors
        cached = self._entries.get(key)
        if cached is not None and repack is not None:
            repack(cached.packed)
            cached.update(versions)
            return cached.packed
        packed = pack()
        self._entries[key] = Cached(tensors, versions, packed)
        return packed

    def find(self, tensors: Sequence[Tensor]) -> Cached[P] | None:
        """Return the entry of tensors that have not changed since it was made, or None."""
        cached = self._entries.get(_key(tensors))
        return cached if cached is not None and cached.fits(tensors) else None

    def clear(self) -> None:
        """Forget everything."""
        self._entries.clear()

    def forget_expired(self) -> None:
        """Let go what was made of tensors that are no more."""
        for key in [k for k, cached in self._entries.items() if cached.is_gone()]:
            del self._entries[key]


class SharedWorkspaces(Generic[W]):
    """The living workspaces of this process that contexts without one of their own share."""

    def __init__(self) -> None:
        self._living: dict[tuple[object, ...], weakref.WeakSet[W]] = {}

    def get(self, setup: BackendSetup, make: Callable[[], W]) -> W:
        """Return a living workspace of this group that serves the layer, or a new one. The same choice on every rank.

        Args:
            setup: of the context that needs it.
            make: constructs one; collective.
        """
        key = (setup.collectives.group.process_group, setup.device, setup.max_tokens_per_rank, setup.comm)
        living = self._living.setdefault(key, weakref.WeakSet())
        fitting = [w for w in living if w.serves(setup.spec, setup.max_tokens_per_rank)]
        # ranks drop layers at their own time: an old workspace is taken only where every rank still has it
        ids = setup.collectives.gather_objects(sorted(w.serial for w in fitting), phase="construction of the workspace")
        common = set(ids[0]).intersection(*ids[1:])
        for workspace in fitting:
            if workspace.serial == min(common, default=None):
                return workspace
        workspace = make()
        living.add(workspace)
        return workspace


def _key(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    return tuple([tensor.data_ptr() for tensor in tensors])


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    return [_UNCOUNTED if tensor.is_inference() else tensor._version for tensor in tensors]


@functools.cache
def _warn_uncounted(backend: str) -> None:
    warnings.warn(
        f"backend {backend} packs these weights again in every call, because tensors made under torch.inference_mode "
        "do not tell when they change; make them outside of it",
        RuntimeWarning,
        stacklevel=2,
    )
