"""Ranks as threads of one process over the C++ engine: quick, and with poisoned memory."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from helpers_moe import Problem, local_weights
from torch import Tensor

from megamoe.comm.local import LocalMemory
from megamoe.config import MoESpec
from megamoe.kernels.cpu_engine import engine_layer, load
from megamoe.kernels.packed import PackedExperts, pack_experts
from megamoe.workspace import Workspace

__all__ = ["ThreadRanks", "instruction_sets", "make_spec"]

_COUNTERS = (
    *("ticket", "published", "exited", "aborts", "arrived"),
    *("l1_done", "l2_done", "unit_l1_done", "unit_l2_done"),
)


def make_spec(**overrides: Any) -> MoESpec:
    """Return a small op; `act_scale` follows the format unless given."""
    form = overrides.get("weight_format", "mxfp4")
    numbers: dict[str, Any] = dict(
        hidden=128,
        intermediate=96,
        num_experts=8,
        top_k=3,
        activation="silu",
        swiglu_limit=None,
        swiglu_alpha=None,
        expert_bias=False,
        weight_format=form,
        act_scale={"none": "none", "mxfp4": "token", "fp8_block": "block128"}[form],
        weight_position="after",
    )
    return MoESpec(**{**numbers, **overrides})


def instruction_sets() -> list[str]:
    """Return the instruction sets of the engine that this CPU runs."""
    found = []
    for name in ("scalar", "avx2", "avx512"):
        try:
            found.append(load().isa_name(name))
        except ValueError:
            continue
    return found


class _Group:
    process_group = None
    global_ranks = range(64)

    def describe(self, rank: int) -> str:
        return f"rank {rank}"


class _ThreadCollectives:
    """What a workspace needs of `Collectives`, for ranks that are threads."""

    def __init__(self, rank: int, shared: list[Any], barrier: threading.Barrier, timeout_s: float) -> None:
        self.rank, self.world_size, self.timeout_s = rank, len(shared), timeout_s
        self.group = _Group()
        self._shared, self._barrier = shared, barrier

    def gather_objects(self, value: Any, *, phase: str) -> list[Any]:
        self._shared[self.rank] = value
        self._barrier.wait(60)
        values = list(self._shared)
        self._barrier.wait(60)
        return values

    def run_together(self, step: Callable[[], Any], *, phase: str) -> Any:
        return step()  # of one process, so that it fails on all or on none


class ThreadRanks:
    """`world_size` ranks on one poisoned workspace for the given ops.

    Args:
        specs: the ops.
        world_size: ranks.
        max_tokens: bound of one generation.
        num_workers: threads of each rank, or one number per rank.
        timeout_s: of every wait.
        isa: instruction set.
    """

    def __init__(
        self,
        specs: Sequence[MoESpec],
        world_size: int,
        *,
        max_tokens: int = 64,
        num_workers: int | Sequence[int] = 2,
        timeout_s: float = 60.0,
        isa: str = "",
    ) -> None:
        self.world_size = world_size
        workers = [num_workers] * world_size if isinstance(num_workers, int) else list(num_workers)
        sizes = [
            Workspace.bytes_for(specs, world_size=world_size, max_tokens_per_rank=max_tokens, num_workers=count)
            for count in workers
        ]
        self.nbytes = max(sizes)
        memories = LocalMemory.allocate_threads(self.nbytes, world_size)
        self._regions = _regions(specs[0], world_size, max_tokens)
        # everything from the data region on is poisoned
        control = self._regions["input"][0]
        for memory in memories:
            ctypes.memset(memory.pointer + control, 0xFF, self.nbytes - control)
        shared: list[Any] = [None] * world_size
        barrier = threading.Barrier(world_size)
        self.workspaces = self.each(
            lambda rank: Workspace(
                specs,
                _ThreadCollectives(rank, shared, barrier, timeout_s),  # type: ignore[arg-type]
                max_tokens_per_rank=max_tokens,
                num_workers=workers[rank],
                memory=memories[rank],
                isa=isa,
            )
        )

    def each(self, function: Callable[[int], Any], limit_s: float = 120.0) -> list[Any]:
        """Run `function(rank)` on every rank at once; raise the first error, or return the results."""
        results, errors = self.outcomes(function, limit_s)
        for error in errors:
            if error is not None:
                raise error
        return results

    def outcomes(
        self, function: Callable[[int], Any], limit_s: float = 120.0
    ) -> tuple[list[Any], list[BaseException | None]]:
        """Run `function(rank)` on every rank at once; return what each returned and raised."""
        results: list[Any] = [None] * self.world_size
        errors: list[BaseException | None] = [None] * self.world_size

        def call(rank: int) -> None:
            try:
                results[rank] = function(rank)
            except BaseException as error:
                errors[rank] = error

        threads = [threading.Thread(target=call, args=(rank,), daemon=True) for rank in range(self.world_size)]
        for thread in threads:
            thread.start()
        for rank, thread in enumerate(threads):
            thread.join(limit_s)
            assert not thread.is_alive(), f"rank {rank} hangs"
        return results, errors

    def pack(self, problem: Problem) -> list[PackedExperts]:
        """Return each rank's packed experts."""
        return [
            pack_experts(local_weights(problem, rank, self.world_size), problem.spec) for rank in range(self.world_size)
        ]

    def clear(self, rank: int, region: str) -> None:
        """Write zeros over a region of a rank's workspace."""
        offset, nbytes = self._regions[region]
        ctypes.memset(self.workspaces[rank]._memory.pointer + offset, 0, nbytes)

    def counters(self, rank: int) -> dict[str, int]:
        """Return the largest byte of every counter of a rank that is zero between calls."""
        base = self.workspaces[rank]._memory.pointer
        found = {}
        for name in _COUNTERS:
            offset, nbytes = self._regions[name]
            found[name] = max(ctypes.string_at(base + offset, nbytes), default=0)
        return found

    def run(
        self, experts: Sequence[PackedExperts], tokens: Sequence[tuple[Tensor, Tensor, Tensor]], **options: Any
    ) -> list[Tensor]:
        """One call on every rank, into poisoned outputs."""
        return self.each(
            lambda rank: self.workspaces[rank].run(
                *tokens[rank], experts[rank], out=torch.full_like(tokens[rank][0], float("nan")), **options
            )
        )


def _regions(spec: MoESpec, world_size: int, max_tokens: int) -> dict[str, tuple[int, int]]:
    """Return name -> (offset, bytes) of every region of a workspace that was made for this op alone."""
    host = load()
    layer = engine_layer(spec, world_size, 1, input_dtype=torch.float32, param_dtype=torch.float32)
    return host.regions(host.WorkspaceLimits(layer, world_size, max_tokens), layer)
