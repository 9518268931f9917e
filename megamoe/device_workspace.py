"""The symmetric workspace of the mega-kernel: one allocation per GPU that serves any number of layers.

    specs = [config.spec for config in layers]
    print(DeviceWorkspace.bytes_for(specs, world_size=8, max_tokens_per_rank=8192))
    workspace = DeviceWorkspace(specs, collectives, max_tokens_per_rank=8192)
    plan = workspace.plan(specs[0], packed_experts)
    workspace.launch(plan, x, topk_ids, topk_weights, out)

Layers on one workspace run one after the other, in the same order on every rank. A launch returns before the kernel has
run, so a failure is raised by the next call or by `check()`; its output is NaN. After it the workspace refuses every
call until all ranks have called `reset()`.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megamoe.comm.base import SymmetricMemory
from megamoe.comm.choice import allocate
from megamoe.comm.collectives import Collectives
from megamoe.config import MoESpec
from megamoe.errors import ConfigError, MegaMoeError
from megamoe.kernels.cpu_engine import load as load_host
from megamoe.kernels.jit import build
from megamoe.kernels.jit import load as load_kernel
from megamoe.kernels.mega_moe import (
    FaultRecord,
    MegaMoeInstance,
    MegaMoePlan,
    Prepared,
    mega_moe_sources,
    workspace_limits,
    workspace_numbers,
)
from megamoe.kernels.mega_trace import read_trace, trace_bytes
from megamoe.kernels.packing.moe import PackedMoeExperts
from megamoe.trace import Trace
from megamoe.workspace import raise_failure

__all__ = ["DeviceWorkspace", "Gpu"]

# FaultStatus of impls/mega_moe/shared.cuh
_STATUSES = {1: "timeout", 2: "aborted", 3: "shape_mismatch", 4: "overflow"}
_ABORT_SHAPE = 0x40  # kAbortShape of layout/control.h, in place of the phase

_serials = [0]


class Gpu:
    """What the workspace asks of CUDA beside the kernel itself.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.index: int = device.index if device.index is not None else torch.cuda.current_device()
        self._event: Any = None

    def num_sms(self) -> int:
        """Return how many CTAs of the mega-kernel run at a time."""
        return int(torch.cuda.get_device_properties(self.index).multi_processor_count)

    def load_kernels(self, act_scales: Collection[str], traced: bool, throttle_gbps: int | None) -> None:
        """Compile and load every instance of the mega-kernel for these granularities of the scales of x."""
        sources = mega_moe_sources(act_scales=act_scales, traced=traced, throttle_gbps=throttle_gbps)
        with ThreadPoolExecutor(len(sources)) as pool:  # NVRTC lets go of the interpreter's lock
            list(pool.map(build, sources))
        for source in sources:
            load_kernel(source, self.index)

    def host_memory(self, nbytes: int) -> Tensor:
        """Return zeroed bytes of the host that kernels write by the same address."""
        return torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True)

    def is_current(self) -> bool:
        """Return whether this thread's current device is this GPU."""
        return bool(torch._C._cuda_getDevice() == self.index)

    def stream(self) -> int:
        """Return the address of torch's current stream."""
        return int(torch._C._cuda_getCurrentRawStream(self.index))

    def eager_stream(self) -> int | None:
        """Return `stream()`; None where this GPU is not the current device, or a graph is captured."""
        if torch._C._cuda_getDevice() != self.index or torch._C._cuda_isCurrentStreamCapturing():
            return None
        return int(torch._C._cuda_getCurrentRawStream(self.index))

    def capture_of(self, stream: int) -> int:
        """Return the number of the graph capture that torch's current stream takes part in, 0 for none."""
        if not torch._C._cuda_isCurrentStreamCapturing():
            return 0
        from cuda.bindings import driver

        status, _, number = driver.cuStreamGetCaptureInfo(driver.CUstream(stream))[:3]
        return int(number) if int(status) == 0 else -1

    def order(self, first: int, then: int) -> None:
        """Let a stream wait for all work that another one has been given so far."""
        from cuda.bindings import driver

        if self._event is None:
            status, self._event = driver.cuEventCreate(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING.value)
            assert int(status) == 0, f"an event cannot be had: {status}"
        (status,) = driver.cuEventRecord(self._event, driver.CUstream(first))
        if int(status) == 0:
            (status,) = driver.cuStreamWaitEvent(driver.CUstream(then), self._event, 0)
        if int(status) != 0:
            # a stream that has been destroyed since: its work is waited for by the host
            self.synchronize()

    def synchronize(self) -> None:
        """Wait on the host for all work of the GPU."""
        torch.cuda.synchronize(self.device)


class _Order:
    """The order of mega-kernels on one GPU, whatever streams and workspaces they come from.

    Two of them at the same time would share the SMs, and could wait for each other across ranks.

    Attributes:
        last: stream of the last one.
    """

    def __init__(self) -> None:
        self.last: int | None = None
        self._captured: tuple[int, int] | None = None

    def enter(self, gpu: Gpu, stream: int) -> None:
        """Make the stream wait for the last call."""
        capture = gpu.capture_of(stream)
        if capture:
            # a captured call can wait for one of its own graph alone; torch orders a capture and eager work
            if self._captured is not None and self._captured[0] == capture and self._captured[1] != stream:
                gpu.order(self._captured[1], stream)
            self._captured = (capture, stream)
            return
        if self.last is not None and self.last != stream:
            gpu.order(self.last, stream)
        self.last = stream


_orders: dict[torch.device, _Order] = {}
_launching = threading.Lock()


class DeviceWorkspace:
    """Symmetric memory, and the launches that work in it. Construction is collective.

    Calls from several streams run in the order in which they were made: the op makes a stream wait for the stream of
    the call before. CUDA graphs are ordered by whoever replays them, like every other work of theirs.

    Args:
        specs: the ops that it must serve.
        collectives: exchanges over the group; their device is this rank's GPU, their timeout bounds every wait.
        max_tokens_per_rank: tokens of a rank that it holds; a call with more runs in chunks, within one launch. The
            same on every rank.
        comm: "local" (one rank), "symm_mem", "nvshmem", or "auto".
        memory: symmetric memory that exists already, zeroed, of at least `nbytes`; None = allocate it.
        num_sms: CTAs of a launch; None = one an SM. Any number gives the same bits.
        throttle_gbps: pulls and scatters of this rank wait by the chip's clock so that both together stay below this
            rate, as over a slower link (experiments); None = they never wait.
        gpu: the calls of CUDA (tests).

    Attributes:
        nbytes: bytes of this rank's allocation.
        limits: WorkspaceLimits (layout/workspace.h), as numbers.
        serial: a number that the ranks of the group share for this workspace.

    Raises:
        ConfigError: the ranks disagree about the bound of tokens or the layers.
        MegaMoeError: the memory cannot be had, or the kernel not compiled.
    """

    def __init__(
        self,
        specs: Sequence[MoESpec],
        collectives: Collectives,
        *,
        max_tokens_per_rank: int,
        comm: str = "auto",
        memory: SymmetricMemory | None = None,
        num_sms: int | None = None,
        throttle_gbps: int | None = None,
        gpu: Gpu | None = None,
    ) -> None:
        self.collectives = collectives
        self.rank, self.world_size = collectives.rank, collectives.world_size
        self.max_tokens_per_rank = max_tokens_per_rank
        self.limits, self.nbytes = _limits(specs, self.world_size, max_tokens_per_rank)
        reports = collectives.gather_objects(
            [max_tokens_per_rank, list(self.limits), self.nbytes, _serials[-1]], phase="construction of the workspace"
        )
        for rank, report in enumerate(reports):
            if report[:3] != reports[0][:3]:
                describe = collectives.group.describe
                raise ConfigError(
                    "parallel.max_tokens_per_rank and the layers of a workspace must be the same on every rank, got "
                    f"{reports[0][0]} tokens on {describe(0)} and {report[0]} on {describe(rank)} "
                    f"({reports[0][2]} and {report[2]} bytes)"
                )
        self.serial: int = max(report[3] for report in reports) + 1
        _serials.append(self.serial)
        self._gpu = gpu or Gpu(collectives.device)
        own_rank = collectives.group.global_ranks[self.rank]
        self._trace = collectives.run_together(lambda: Trace.from_environment(own_rank), phase="choice of a trace")
        self._throttle_gbps = throttle_gbps
        # a peer that compiles while others wait in a kernel would use up their time
        act_scales = {spec.act_scale for spec in specs}
        load_kernels = partial(self._gpu.load_kernels, act_scales, self._trace is not None, throttle_gbps)
        collectives.run_together(load_kernels, phase="compilation of the mega-kernel")
        self._memory = memory if memory is not None else allocate(comm, self.nbytes, collectives)
        tensor = self._memory.tensor
        if tensor is None or self._memory.nbytes < self.nbytes:
            raise ValueError(f"memory: needs {self.nbytes} bytes of a GPU, got {self._memory.nbytes}")
        self._tensor: Tensor = tensor
        numbers = workspace_numbers(specs[0], self.limits)
        self._control_bytes = numbers["control_bytes"]
        first = numbers["generation"]
        self._generation = tensor[first : first + 4].view(torch.int32)
        first = numbers["aborts"]
        self._aborts = tensor[first : first + 8 * self.world_size].view(torch.int64)
        self._bases = torch.tensor(self._memory.peer_pointers, dtype=torch.int64, device=tensor.device)
        self._record_memory = self._gpu.host_memory(ctypes.sizeof(FaultRecord))
        self._record = FaultRecord.from_address(self._record_memory.data_ptr())
        self._num_sms = num_sms
        self._events: Tensor | None = None  # of the last call, under a trace
        if self._trace is not None:
            ctas = min(num_sms or self._gpu.num_sms(), self._gpu.num_sms())
            self._events = torch.zeros(trace_bytes(ctas), dtype=torch.uint8, device=tensor.device)
        self._scratch: Tensor | None = None
        self._order = _orders.setdefault(tensor.device, _Order())

    @staticmethod
    def bytes_for(specs: Sequence[MoESpec], *, world_size: int, max_tokens_per_rank: int) -> int:
        """Return the bytes that one rank allocates, without allocating anything."""
        return _limits(specs, world_size, max_tokens_per_rank)[1]

    @property
    def tensor(self) -> Tensor:
        """This rank's memory, `[nbytes]` uint8."""
        return self._tensor

    @property
    def capturing(self) -> bool:
        """Whether torch's current stream takes part in the capture of a graph."""
        return self._gpu.capture_of(self._gpu.stream()) != 0

    def serves(self, spec: MoESpec, max_tokens_per_rank: int) -> bool:
        """Return whether a layer fits into this workspace."""
        if max_tokens_per_rank != self.max_tokens_per_rank:
            return False
        needs = workspace_limits(spec, self.world_size, max_tokens_per_rank)
        if any(need > have for need, have in zip(needs, self.limits, strict=True)):
            return False
        return workspace_numbers(spec, self.limits)["bytes"] <= self.nbytes

    def plan(self, spec: MoESpec, experts: PackedMoeExperts, *, refuses: bool = False) -> MegaMoePlan:
        """Return a layer with this rank's packed experts, ready for `launch`; `refuses` as `MegaMoePlan` takes it."""
        plan = MegaMoePlan(
            spec,
            experts,
            self.limits,
            rank=self.rank,
            bases=self._bases,
            base=self._memory.pointer,
            record=self._record_memory.data_ptr(),
            timeout_s=self.collectives.timeout_s,
            num_sms=self._num_sms,
            scratch=self._scratch,
            trace=self._events,
            refuses=refuses,
            throttle_gbps=self._throttle_gbps,
        )
        self._scratch = plan.scratch  # one launch at a time is in flight, so one serves all plans
        return plan

    def launch(
        self,
        plan: MegaMoePlan,
        x: Tensor | None,
        topk_ids: Tensor,
        topk_weights: Tensor,
        out: Tensor,
        *,
        received: Tensor | None = None,
        instance: MegaMoeInstance | None = None,
        refused: int = 0,
    ) -> None:
        """Run one layer on this rank's tokens, on torch's current stream. Collective; waits for nothing.

        Under MEGAMOE_TRACE it waits for the kernel, reads its events and cannot be captured.

        Args:
            plan: of `plan()`.
            x, topk_ids, topk_weights, out, received, instance, refused: as `MegaMoePlan.launch` takes them.

        Raises:
            MegaMoETimeout, MegaMoeError: an earlier call failed, as `check` says.
            ConfigError: more tokens than the bound, without `x`.
            MegaMoeError: a traced call in the capture of a graph.
        """
        gpu = self._gpu
        if not gpu.is_current():
            with torch.cuda.device(gpu.index):
                return self.launch(
                    plan, x, topk_ids, topk_weights, out, received=received, instance=instance, refused=refused
                )
        if x is None and topk_ids.shape[0] > self.max_tokens_per_rank:
            raise ConfigError(
                f"parallel.max_tokens_per_rank: {self.collectives.group.describe(self.rank)} brought "
                f"{topk_ids.shape[0]} tokens to one call, the workspace holds {self.max_tokens_per_rank}; raise it"
            )
        if self._record.status:
            self.check()
        if self._trace is not None and self.capturing:
            raise MegaMoeError(
                "MEGAMOE_TRACE: the events of a call are read by the host when it ends, so none can be captured in a "
                "graph; capture without it"
            )
        recorded: Tensor | None = None
        with _launching:
            stream = gpu.stream()
            self._order.enter(gpu, stream)
            if self._events is not None:
                self._events.zero_()
            plan.launch(x, topk_ids, topk_weights, out, stream, instance=instance, received=received, refused=refused)
            if self._events is not None:
                recorded = self._events.clone()  # the next call, of whatever thread, may overwrite it
        if self._trace is not None and recorded is not None:
            # outside of the lock: the kernel may wait for a rank whose thread needs it
            call = self._trace.new_call()
            for cta in read_trace(recorded):
                self._trace.add_cta(call, cta.cta, cta.events, start=cta.start, cycles=cta.cycles, dropped=cta.dropped)

    def launch_again(
        self, prepared: Prepared, x: int, ids: int, weights: int, out: int, sizes: tuple[int, int]
    ) -> bool:
        """Launch as `launch` does, in the shortest way; False, and nothing done, where it is not so simple.

        Args:
            prepared: of a plan of this workspace.
            x, ids, weights, out: addresses.
            sizes: number of tokens, and bytes of an id.
        """
        if self._record.status or self._trace is not None:
            return False
        with _launching:
            stream = self._gpu.eager_stream()
            if stream is None or stream != self._order.last:
                return False
            prepared.again(x, ids, weights, out, sizes, stream)
        return True

    def check(self) -> None:
        """Raise what the next call would raise if a call is known to have failed; else do nothing. Waits for nothing.

        To know about all calls made so far, synchronise the device first.

        Raises:
            MegaMoETimeout: a rank did not answer; the message names the phase and the rank.
            MegaMoeError: the ranks called different layers, or a rank wanted to bring more tokens than the bound to a
                layer that does not chunk; after the latter the workspace goes on.
        """
        record = self._record
        if not record.status:
            return
        status, phase = _STATUSES[record.status], record.phase
        if status == "aborted" and phase == _ABORT_SHAPE:
            status, phase = "shape_mismatch", 0
            if record.whom == self.rank:
                # the others name this rank; it names the first of them
                record.whom = next((rank for rank, word in enumerate(self._aborts.tolist()) if word), self.rank)
        if status == "overflow":
            record.status = 0
        raise_failure(
            status,
            load_host().PHASES[phase],
            record,
            group=self.collectives.group,
            rank=self.rank,
            own_shape=list(record.own_shape),
        )

    def reset(self) -> None:
        """Make the workspace usable again after an error. Collective: every rank of the group calls it.

        Raises:
            MegaMoETimeout: a rank did not come.
        """
        self._gpu.synchronize()
        # the first exchange proves that no kernel of the group runs, the second that everyone has cleared
        generations = self.collectives.gather_objects(int(self._generation), phase="reset")
        self._tensor[: self._control_bytes].zero_()
        self._generation.fill_(max(generations) + 2)
        self._gpu.synchronize()
        self._record_memory.zero_()
        self.collectives.gather_objects(None, phase="reset")

    def close(self) -> None:
        """Give the memory back. Idempotent. Waits for the GPU."""
        self._gpu.synchronize()
        self._memory.close()


def _limits(specs: Sequence[MoESpec], world_size: int, max_tokens: int) -> tuple[tuple[int, ...], int]:
    """Return the limits that serve all specs, and the bytes of a rank."""
    if not specs:
        raise ValueError("specs: at least one layer")
    each = [workspace_limits(spec, world_size, max_tokens) for spec in specs]
    limits = tuple(max(column) for column in zip(*each, strict=True))
    return limits, max(workspace_numbers(spec, limits)["bytes"] for spec in specs)
