"""The context of a MoE op: which backend runs it, on which ranks, under which handle.

The operators of `megamoe.functional` take an integer handle instead of an object, because a compiler's graph holds
tensors and numbers only. The table here leads from the one to the other.
"""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from typing import Any

import torch

from megamoe import env
from megamoe.backends import choose_backend
from megamoe.backends.base import Backend, BackendSetup
from megamoe.comm.collectives import Collectives
from megamoe.comm.groups import GroupLike, resolve_group
from megamoe.config import MoESpec, local_expert_range
from megamoe.errors import ConfigError, MegaMoeError

__all__ = ["MoEContext", "context_of", "shared_context"]

_PHASE = "construction"


class MoEContext:
    """One MoE op on one group and device: its backend, its workspace, its order of calls.

    Construction is collective: every rank of the group makes one, and when one rank cannot, all raise together.

    Args:
        spec: the resolved numbers of the op.
        group: who shares the experts: a `ProcessGroup`, a `DeviceMesh` (one dimension, or one called "ep"), or None
            for one rank.
        backend: "auto" for the first that can run here, or "sm90", "cpu", "reference".
        device: where x and the weights live.
        max_tokens_per_rank: tokens that one rank may bring to one call; the same on every rank.
        overflow: above that bound, "chunk" does it in several calls, "error" raises the same error on every rank.
        timeout_s: bound of every wait on another rank, seconds.
        check: checked mode: ids and the order of calls are verified. Also switched on by `MEGAMOE_CHECK=1`.
        comm: symmetric memory backend, "auto" to choose.
        workspace: symmetric memory to share with other contexts, for backends that use one; None = their own.

    Attributes:
        handle: the integer that stands for this context in the operator.
        backend_name: the backend in use.
        rank, world_size: within the group.
        num_local_experts, first_expert: the experts of this rank.
        order: `[1]` int64 on the device; the operators claim to write it, so that compilers keep their order.

    Raises:
        ConfigError: sizes that cannot be split over the group, or ranks that disagree.
        BackendUnavailable: the named backend cannot run here, and why.
    """

    def __init__(
        self,
        spec: MoESpec,
        group: GroupLike = None,
        backend: str = "auto",
        *,
        device: torch.device | str,
        max_tokens_per_rank: int = 8192,
        overflow: str = "chunk",
        timeout_s: float = 600.0,
        check: bool = False,
        comm: str = "auto",
        workspace: Any = None,
    ) -> None:
        self._build(
            *_agree(
                spec,
                group,
                backend,
                device=device,
                max_tokens_per_rank=max_tokens_per_rank,
                overflow=overflow,
                timeout_s=timeout_s,
                check=check,
                comm=comm,
                workspace=workspace,
            )
        )

    def _build(self, backend_class: type[Backend], setup: BackendSetup) -> None:
        self.spec = spec = setup.spec
        self.device = setup.device
        self.check = setup.check
        self.collectives = setup.collectives
        self.group = setup.collectives.group
        self.rank, self.world_size = self.group.rank, self.group.world_size
        self.first_expert, last = local_expert_range(spec.num_experts, self.rank, self.world_size)
        self.num_local_experts = last - self.first_expert
        self.backend: Backend = backend_class(setup)
        self.backend_name = backend_class.name
        self.differentiable = backend_class.differentiable and spec.weight_format == "none"
        self.order = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.handle = handle = next(_handles)
        _contexts[handle] = weakref.ref(self, lambda _: _contexts.pop(handle, None))

    def require_gradient(self) -> None:
        """Raise `MegaMoeError` when this context has no backward."""
        if self.differentiable:
            return
        if self.spec.weight_format != "none":
            raise MegaMoeError(
                f"mega_moe: a gradient was asked for, and experts in the format {self.spec.weight_format} have none; "
                "call it under torch.no_grad(), or use quantization.weights: none"
            )
        raise MegaMoeError(
            f"mega_moe: a gradient was asked for, and the backend {self.backend_name} has no backward; "
            "call it under torch.no_grad(), or use kernel.backend: reference"
        )

    def close(self) -> None:
        """Free what the backend owns and forget the handle. Idempotent."""
        if _contexts.pop(self.handle, None) is not None:
            self.backend.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> MoEContext:
        # a copied layer works on the same ranks: it shares the context, as it would share a process group
        return self

    def __reduce__(self) -> Any:
        raise TypeError("a MoEContext belongs to its process; save the layer's state_dict instead of the layer")

    def __repr__(self) -> str:
        return (
            f"MoEContext(backend={self.backend_name}, rank={self.rank}, world_size={self.world_size}, "
            f"device={self.device}, handle={self.handle})"
        )


# handle -> context; weak, so that a dropped layer frees its backend
_contexts: dict[int, weakref.ref[MoEContext]] = {}
_handles = itertools.count(1)
# what a context was asked for -> the context, for layers that ask for the same
_shared: weakref.WeakValueDictionary[Any, MoEContext] = weakref.WeakValueDictionary()


def context_of(handle: int) -> MoEContext:
    """Return the context that a handle stands for.

    Raises:
        MegaMoeError: it has been closed, or nothing holds it any more.
    """
    reference = _contexts.get(handle)
    context = None if reference is None else reference()
    if context is None:
        raise MegaMoeError(f"mega_moe: the context with handle {handle} has been closed or was dropped")
    return context


def shared_context(spec: MoESpec, group: GroupLike = None, backend: str = "auto", **options: Any) -> MoEContext:
    """Return the context that was made with equal arguments and is still in use, or make one. Collective.

    The layers of a model share one context this way: one workspace, and one handle, so that code compiled for one
    layer serves the next. Arguments as for `MoEContext`.
    """
    backend_class, setup = _agree(spec, group, backend, **options)
    workspace, process_group = setup.workspace, setup.collectives.group.process_group
    # the context holds group and workspace, so their identities stay taken as long as the entry is there
    key = (
        backend_class,
        dataclasses.replace(setup, collectives=None, workspace=None),  # type: ignore[arg-type]
        setup.collectives.timeout_s,
        id(process_group),
        id(workspace),
    )
    found = _shared.get(key)
    if found is not None and found.handle not in _contexts:
        found = None
    # unused contexts vanish when Python collects them, which need not be at the same time on every rank
    if all(setup.collectives.gather_objects(found is not None, phase=_PHASE)):
        assert found is not None
        return found
    context = MoEContext.__new__(MoEContext)
    context._build(backend_class, setup)
    _shared[key] = context
    return context


def _agree(
    spec: MoESpec,
    group: GroupLike,
    backend: str,
    *,
    device: torch.device | str,
    max_tokens_per_rank: int = 8192,
    overflow: str = "chunk",
    timeout_s: float = 600.0,
    check: bool = False,
    comm: str = "auto",
    workspace: Any = None,
) -> tuple[type[Backend], BackendSetup]:
    """Choose the backend and check that every rank asks for the same; raise on all ranks or on none."""
    device = _with_index(torch.device(device))
    ranks = resolve_group(group)
    collectives = Collectives(ranks, device, timeout_s)

    def choose() -> type[Backend]:
        if overflow not in ("chunk", "error"):
            raise ConfigError(f"overflow must be chunk or error, got {overflow!r}")
        if max_tokens_per_rank < 1:
            raise ConfigError(f"max_tokens_per_rank must be at least 1, got {max_tokens_per_rank}")
        local_expert_range(spec.num_experts, ranks.rank, ranks.world_size)
        return choose_backend(backend, spec, device, ranks.world_size)

    backend_class = collectives.run_together(choose, phase=_PHASE)
    setup = BackendSetup(
        spec=spec,
        collectives=collectives,
        device=device,
        max_tokens_per_rank=max_tokens_per_rank,
        overflow=overflow,
        check=check or env.flag("MEGAMOE_CHECK"),
        comm=comm,
        workspace=workspace,
    )
    settings = {
        "parallel.max_tokens_per_rank": max_tokens_per_rank,
        "parallel.overflow": overflow,
        "parallel.comm": comm,
        "kernel.backend": backend_class.name,
        "kernel.check": setup.check,
        **{f"MoESpec.{name}": value for name, value in dataclasses.asdict(spec).items()},
    }
    reports = collectives.gather_objects(settings, phase=_PHASE)
    for name in settings:
        for rank, report in enumerate(reports):
            if report[name] != reports[0][name]:
                raise ConfigError(
                    f"{name} must be the same on every rank, got {reports[0][name]} on {ranks.describe(0)} "
                    f"and {report[name]} on {ranks.describe(rank)}"
                )
    return backend_class, setup


def _with_index(device: torch.device) -> torch.device:
    """Return the device as tensors report it: a GPU with its index."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device
