"""The symmetric workspace of the CPU engine: one allocation per rank that serves any number of layers.

    specs = [config.spec for config in layers]
    print(Workspace.bytes_for(specs, world_size=4, max_tokens_per_rank=1024))
    workspace = Workspace(specs, collectives, max_tokens_per_rank=1024)

Layers on one workspace run one after the other, in the same order on every rank. After a timeout the workspace refuses
every call until all ranks have called `reset()`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from megamoe import env
from megamoe.comm.base import SymmetricMemory
from megamoe.comm.choice import allocate
from megamoe.comm.collectives import Collectives
from megamoe.comm.groups import RankGroup
from megamoe.config import MoESpec
from megamoe.errors import ConfigError, MegaMoeError, MegaMoETimeout
from megamoe.kernels.cpu_engine import engine_layer, load
from megamoe.kernels.packed import PackedExperts, refuse_other_layout
from megamoe.trace import Trace

__all__ = ["Workspace", "default_workers", "raise_failure"]

_INPUTS = (torch.float32, torch.bfloat16)

_serials = [0]


def default_workers() -> int:
    """Return the engine's number of threads on one rank: MEGAMOE_NUM_WORKERS, else as many as torch uses."""
    chosen = env.value("MEGAMOE_NUM_WORKERS")
    return max(1, int(chosen)) if chosen else max(1, torch.get_num_threads())


class Workspace:
    """Symmetric memory and the engine that works in it. Construction is collective.

    Args:
        specs: the ops that it must serve.
        collectives: exchanges over the group.
        max_tokens_per_rank: tokens of one generation; calls with more run in chunks. The same on every rank.
        comm: "local" (one rank), "shm" (processes of one host), or "auto".
        num_workers: threads of this rank; None = `default_workers()`. Ranks may differ.
        memory: symmetric memory that exists already, of at least `nbytes`; None = allocate it.
        isa: instruction set, "" for the best that this CPU has.

    Attributes:
        nbytes: bytes of this rank's allocation.
        serial: a number that the ranks of the group share for this workspace.

    Raises:
        ConfigError: the ranks disagree about the bound of tokens.
        MegaMoeError: the memory cannot be had.
    """

    def __init__(
        self,
        specs: Sequence[MoESpec],
        collectives: Collectives,
        *,
        max_tokens_per_rank: int,
        comm: str = "auto",
        num_workers: int | None = None,
        memory: SymmetricMemory | None = None,
        isa: str = "",
    ) -> None:
        self.collectives = collectives
        self.rank, self.world_size = collectives.rank, collectives.world_size
        self.max_tokens_per_rank = max_tokens_per_rank
        self.num_workers = num_workers or default_workers()
        self._limits, own_bytes = _limits(specs, self.world_size, max_tokens_per_rank, self.num_workers)
        reports = collectives.gather_objects(
            [max_tokens_per_rank, list(self._limits.numbers), own_bytes, _serials[-1], _process()],
            phase="construction of the workspace",
        )
        for rank, (bound, numbers, *_) in enumerate(reports):
            if bound != reports[0][0] or numbers != reports[0][1]:
                raise ConfigError(
                    f"parallel.max_tokens_per_rank and the layers of a workspace must be the same on every rank, got "
                    f"{reports[0][0]} tokens on {collectives.group.describe(0)} and {bound} on "
                    f"{collectives.group.describe(rank)} (limits {reports[0][1]} and {numbers})"
                )
        # rings may differ between ranks, the allocation may not
        self.nbytes: int = max(report[2] for report in reports)
        self.serial: int = max(report[3] for report in reports) + 1
        _serials.append(self.serial)
        own_rank = collectives.group.global_ranks[self.rank]
        self._trace = collectives.run_together(lambda: Trace.from_environment(own_rank), phase="choice of a trace")
        self._memory = memory if memory is not None else allocate(comm, self.nbytes, collectives)
        if self._memory.nbytes < self.nbytes:
            raise ValueError(f"memory: needs {self.nbytes} bytes, got {self._memory.nbytes}")
        pids = [_watched(report[4]) for report in reports]
        self._engine = load().Engine(
            self.rank, self._memory.peer_pointers, self._memory.nbytes, self._limits, self.num_workers, isa, pids
        )
        self._busy = threading.Lock()
        self._layers: dict[tuple[Any, ...], Any] = {}

    @staticmethod
    def bytes_for(
        specs: Sequence[MoESpec], *, world_size: int, max_tokens_per_rank: int, num_workers: int | None = None
    ) -> int:
        """Return the bytes that one rank allocates, without allocating anything."""
        return _limits(specs, world_size, max_tokens_per_rank, num_workers or default_workers())[1]

    def serves(self, spec: MoESpec, max_tokens_per_rank: int) -> bool:
        """Return whether a layer fits into this workspace."""
        if max_tokens_per_rank != self.max_tokens_per_rank:
            return False
        limits, nbytes = _limits([spec], self.world_size, max_tokens_per_rank, self.num_workers)
        return nbytes <= self.nbytes and all(
            need <= have for need, have in zip(limits.numbers, self._limits.numbers, strict=True)
        )

    def run(
        self,
        x: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        experts: PackedExperts,
        *,
        overflow: str = "chunk",
        check: bool = False,
        timeout_s: float | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Run one layer on this rank's tokens. Collective; ranks may bring different numbers of tokens.

        Args:
            x: `[num_tokens, hidden]` FP32 or BF16, contiguous.
            topk_ids: `[num_tokens, top_k]` int32 or int64, contiguous.
            topk_weights: `[num_tokens, top_k]` FP32, contiguous.
            experts: this rank's, packed.
            overflow: "chunk", or "error" to raise on every rank when one brings more than the bound.
            check: raise on every rank when one has an id that is no expert.
            timeout_s: bound of every wait; None = that of the group.
            out: where the result goes, contiguous, shaped and typed as x; None = a new tensor.

        Returns:
            `[num_tokens, hidden]` in x.dtype; all NaN where an error is raised.

        Raises:
            MegaMoETimeout: a rank did not answer, its process has ended, or a signal stopped it.
            KeyboardInterrupt: or what else a signal's handler raises, within a second, also while it waits.
            MegaMoeError: ranks that call different layers; too many tokens; an id out of range; concurrent use.
        """
        refuse_other_layout(experts)
        layer = self._layer(experts, x.dtype)
        out = torch.empty_like(x) if out is None else out
        if not self._busy.acquire(blocking=False):
            raise MegaMoeError(
                "workspace: another thread is in a call; layers on one workspace run one after the other"
            )
        try:
            outcome = self._engine.run(
                layer,
                experts.addresses(),
                x.data_ptr(),
                topk_ids.data_ptr(),
                topk_ids.element_size(),
                topk_weights.data_ptr(),
                out.data_ptr(),
                x.shape[0],
                self.collectives.timeout_s if timeout_s is None else timeout_s,
                overflow == "error",
                check,
                self._trace is not None,
            )
            if self._trace is not None:
                self._trace.add(self._engine.trace())
        finally:
            self._busy.release()
        self._raise(outcome, experts.spec)
        return out

    def check(self) -> None:
        """Raise what the next call would raise if the workspace is broken; else do nothing."""
        self._raise(self._engine.check(), None)

    def reset(self) -> None:
        """Make the workspace usable again after an error. Collective: every rank of the group calls it.

        Raises:
            MegaMoETimeout: a rank did not come.
        """
        # the first exchange proves that no worker is in a call, the second that everyone has cleared
        generations = self.collectives.gather_objects(self._engine.generation, phase="reset")
        self._engine.reset(max(generations) + 2)
        self.collectives.gather_objects(None, phase="reset")

    def close(self) -> None:
        """Give the memory back. Idempotent."""
        self._engine = None
        self._memory.close()

    def _layer(self, experts: PackedExperts, input_dtype: torch.dtype) -> Any:
        key = (experts.spec, input_dtype, experts.param_dtype)
        if key not in self._layers:
            if input_dtype not in _INPUTS:
                raise ValueError(f"x: the cpu backend takes float32 or bfloat16, got {input_dtype}")
            self._layers[key] = engine_layer(
                experts.spec,
                self.world_size,
                self.num_workers,
                input_dtype=input_dtype,
                param_dtype=experts.param_dtype,
            )
        return self._layers[key]

    def _raise(self, outcome: Any, spec: MoESpec | None) -> None:
        host = load()
        status = host.STATUSES[outcome.status]
        if status != "ok":
            phase = host.PHASES[outcome.phase]
            raise_failure(status, phase, outcome, group=self.collectives.group, rank=self.rank, spec=spec)


def raise_failure(
    status: str, phase: str, outcome: Any, *, group: RankGroup, rank: int, spec: MoESpec | None = None
) -> NoReturn:
    """Raise what ended a call, in the words that every workspace has for it.

    Args:
        status: "timeout", "gone", "interrupted", "aborted", "shape_mismatch", "overflow" or "bad_ids".
        phase: in which it happened.
        outcome: has `whom` (a rank of the group), `seen`, `expected`, and for a mismatch `seen_shape`.
        group: who takes part.
        rank: this one.
        spec: what this rank called, where it is known.
    """
    me, other = group.describe(rank), group.describe(outcome.whom)
    again = "all ranks must call workspace.reset() before the next call"
    if status == "timeout":
        raise MegaMoETimeout(
            f"{phase}: {me} waited for {other}, which did not answer in time (saw {outcome.seen:#x}, expected "
            f"{outcome.expected:#x}); {again}"
        )
    if status == "gone":
        raise MegaMoETimeout(f"{phase}: {me} waited for {other}, whose process has ended")
    if status == "interrupted":
        raise MegaMoETimeout(f"{me} stopped because a signal interrupted {other} in a call; {again}")
    if status == "aborted":
        raise MegaMoETimeout(f"{phase}: {me} stopped because {other} did not answer a rank in time; {again}")
    if status == "shape_mismatch":
        theirs = "" if not any(outcome.seen_shape) else f": {other} {_numbers(outcome.seen_shape)}"
        ours = "" if spec is None else f", {me} {_numbers(_shape(spec))}"
        raise MegaMoeError(
            f"{phase}: {me} and {other} called different layers{theirs}{ours}; every rank must call the same "
            f"layers in the same order; {again}"
        )
    if status == "overflow":
        raise MegaMoeError(
            f"parallel.max_tokens_per_rank: {other} brought {outcome.seen} tokens, the bound is "
            f"{outcome.expected}; raise it or set parallel.overflow: chunk"
        )
    raise MegaMoeError(
        f"topk_ids: {other} has {outcome.seen} ids above the last expert; valid are 0 to {outcome.expected - 1}, "
        "or -1 for no expert"
    )


def _process() -> tuple[int, str]:
    """Return this process as its peers may know it: pid, and the name space in which that is its pid."""
    try:
        return os.getpid(), os.readlink("/proc/self/ns/pid")
    except OSError:
        return os.getpid(), ""


def _watched(process: tuple[int, str]) -> int:
    """Return the pid that the engine looks after, 0 for this process's own and for one that cannot be seen from it."""
    pid, namespace = _process()
    return process[0] if process != (pid, namespace) and process[1] == namespace else 0


def _limits(specs: Sequence[MoESpec], world_size: int, max_tokens: int, num_workers: int) -> tuple[Any, int]:
    """Return the limits that serve all specs, and the bytes of a rank."""
    if not specs:
        raise ValueError("specs: at least one layer")
    host = load()
    # FP32 rows are the largest, whatever a layer's own dtype turns out to be
    layers = [
        engine_layer(spec, world_size, num_workers, input_dtype=torch.float32, param_dtype=torch.float32)
        for spec in specs
    ]
    limits = host.WorkspaceLimits(layers[0], world_size, max_tokens)
    for layer in layers[1:]:
        limits.include(host.WorkspaceLimits(layer, world_size, max_tokens))
    return limits, max(host.workspace_bytes(limits, layer) for layer in layers)


def _shape(spec: MoESpec) -> list[int]:
    return [spec.hidden, spec.intermediate, spec.num_experts, spec.top_k]


def _numbers(shape: Sequence[int]) -> str:
    hidden, intermediate, experts, top_k = shape[:4]
    return f"(hidden {hidden}, intermediate {intermediate}, {experts} experts, top-{top_k})"
