"""The mega-kernel for tests: its host side without a GPU, with a launch that records; and problems on a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from helpers_moe import Problem, make_tokens
from torch import Tensor

import megamoe.device_workspace as device_workspace
import megamoe.kernels.jit.driver as jit_driver
import megamoe.kernels.mega_moe as mega_kernel
from megamoe.backends.sm90 import Sm90Backend
from megamoe.comm.base import SymmetricMemory
from megamoe.comm.collectives import Collectives
from megamoe.comm.groups import RankGroup
from megamoe.config import MoESpec
from megamoe.device_workspace import DeviceWorkspace, Gpu
from megamoe.functional import MoEContext
from megamoe.kernels.mega_moe import INSTANCES
from megamoe.kernels.weights import ExpertWeights, quantize_experts

__all__ = [
    "FakeGpu",
    "FakePlan",
    "HostMemory",
    "gpu_problem",
    "gpu_tokens",
    "launch",
    "make_workspace",
    "mega_spec",
    "on_the_host",
    "record_launches",
    "same_bits",
]

Tokens = tuple[Tensor, Tensor, Tensor]


def mega_spec(**changes: Any) -> MoESpec:
    """Return a small op that the mega-kernel runs."""
    numbers: dict[str, Any] = dict(
        hidden=256, intermediate=320, num_experts=8, top_k=2, weight_format="mxfp4", act_scale="token"
    )
    return MoESpec(**{**numbers, **changes})


class FakeGpu(Gpu):
    """Streams are numbers that the test sets; what they are asked to wait for is kept."""

    def __init__(self) -> None:
        self.current, self.capture, self.loaded, self.loaded_traced = 1, 0, 0, False
        self.loaded_scales: set[str] = set()
        self.ordered: list[tuple[int, int]] = []
        self.synchronized = 0

    def num_sms(self) -> int:
        return 2

    def load_kernels(self, act_scales: Collection[str], traced: bool, throttle_gbps: int | None) -> None:
        self.loaded += 1
        self.loaded_scales, self.loaded_traced = set(act_scales), traced

    def host_memory(self, nbytes: int) -> Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8)

    def is_current(self) -> bool:
        return True

    def stream(self) -> int:
        return self.current

    def eager_stream(self) -> int | None:
        return None if self.capture else self.current

    def capture_of(self, stream: int) -> int:
        return self.capture

    def order(self, first: int, then: int) -> None:
        self.ordered.append((first, then))

    def synchronize(self) -> None:
        self.synchronized += 1


class HostMemory(SymmetricMemory):
    """A rank's memory that looks like a GPU's; peers have theirs elsewhere, at the same address."""

    name = "host"

    def __init__(self, nbytes: int, rank: int = 0) -> None:
        self.rank, self.world_size, self.nbytes = rank, rank + 1, nbytes
        self.tensor = torch.zeros(nbytes, dtype=torch.uint8)
        self.closed = False

    @property
    def peer_pointers(self) -> list[int]:
        assert self.tensor is not None
        return [self.tensor.data_ptr()] * self.world_size

    def barrier(self, timeout_s: float) -> None:
        pass

    def close(self) -> None:
        self.closed = True


class FakePlan:
    """Stands in for `MegaMoePlan`: keeps what it was made of, and every launch; the output becomes ones."""

    made: list[FakePlan] = []
    launches: list[dict[str, Any]] = []

    def __init__(self, spec: MoESpec, experts: Any, limits: tuple[int, ...], **options: Any) -> None:
        self.spec, self.experts, self.limits, self.options = spec, experts, limits, options
        given = options.get("scratch")
        self.scratch = torch.zeros(4) if given is None else given
        FakePlan.made.append(self)

    def launch(
        self,
        x: Tensor | None,
        topk_ids: Tensor,
        topk_weights: Tensor,
        out: Tensor,
        stream: int,
        *,
        instance: Any = None,
        received: Tensor | None = None,
        refused: int = 0,
    ) -> None:
        out.fill_(1.0)
        given = {"x": x, "ids": topk_ids, "weights": topk_weights, "out": out, "stream": stream, "received": received}
        FakePlan.launches.append({**given, "refused": refused, "plan": self})

    def prepared(self, num_tokens: int) -> FakePlan:
        """Stand in for the launch too; only `launch` knows the tensors, so a test asks for no launch by addresses."""
        return self


def record_launches(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    """Let workspaces of this test launch nothing; return the GPU that they all get."""
    gpu = FakeGpu()
    monkeypatch.setattr(FakePlan, "made", [])
    monkeypatch.setattr(FakePlan, "launches", [])
    monkeypatch.setattr(device_workspace, "MegaMoePlan", FakePlan)
    monkeypatch.setattr(device_workspace, "Gpu", lambda device: gpu)
    monkeypatch.setattr(device_workspace, "_orders", {})
    monkeypatch.setattr(device_workspace, "allocate", lambda comm, nbytes, collectives: HostMemory(nbytes))
    return gpu


@contextlib.contextmanager
def on_the_host(driver: Any) -> Iterator[FakeGpu]:
    """Let contexts on CPU tensors take the mega-kernel's way up to the driver call.

    Args:
        driver: stands for `jit.driver.Driver`.
    """
    gpu, properties = FakeGpu(), SimpleNamespace(multi_processor_count=132)
    with contextlib.ExitStack() as stack:
        for target, name, value in (
            (jit_driver, "_driver", driver),
            (mega_kernel, "load", lambda source, device: SimpleNamespace(address=4096)),
            (device_workspace, "Gpu", lambda device: gpu),
            (device_workspace, "_orders", {}),
            (device_workspace, "allocate", lambda comm, nbytes, collectives: HostMemory(nbytes)),
            (Sm90Backend, "unavailable", classmethod(lambda cls, *_: None)),
            (torch.cuda, "get_device_properties", lambda device: properties),
        ):
            stack.enter_context(mock.patch.object(target, name, value))
        yield gpu


def make_workspace(specs: list[MoESpec], max_tokens: int = 64, **options: Any) -> DeviceWorkspace:
    """Return a workspace of one rank in memory of the CPU."""
    collectives = Collectives(RankGroup(None, 0, 1, (0,)), torch.device("cpu"), 3.0)
    return DeviceWorkspace(specs, collectives, max_tokens_per_rank=max_tokens, **options)


# ---- on a GPU -------------------------------------------------------------------------------------------------------


def gpu_problem(spec: MoESpec, seed: int = 0, *, positive: bool = False) -> Problem:
    """Draw the experts of a layer on the current GPU; every process with this GPU model draws the same.

    Args:
        spec: the op.
        seed: of the draw.
        positive: make all weights positive.
    """
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape: int, scale: float) -> Tensor:
        values = torch.randn(*shape, generator=generator, device="cuda") * scale
        return values.abs() if positive else values

    w13 = normal(spec.num_experts, 2 * spec.intermediate, spec.hidden, scale=2 * spec.hidden**-0.5)
    w2 = normal(spec.num_experts, spec.hidden, spec.intermediate, scale=spec.intermediate**-0.5)
    b13 = normal(spec.num_experts, 2 * spec.intermediate, scale=0.5) if spec.expert_bias else None
    b2 = normal(spec.num_experts, spec.hidden, scale=0.5) if spec.expert_bias else None
    return Problem(spec, w13, w2, b13, b2, quantize_experts(w13, w2, b13, b2, spec.weight_format))


def gpu_tokens(spec: MoESpec, num_tokens: int, seed: int = 0) -> Tokens:
    """Draw BF16 x, distinct ids int64 and weights FP32, on the current GPU."""
    x, ids, weights = make_tokens(spec, num_tokens, dtype=torch.bfloat16, seed=seed)
    return x.cuda(), ids.cuda(), weights.cuda()


def launch(
    context: MoEContext,
    tokens: Tokens,
    experts: ExpertWeights,
    instance: str | None = None,
    received: Tensor | None = None,
    fill: float = float("nan"),
) -> Tensor:
    """Run the mega-kernel by the instance of this name, or by the one that it chooses; `fill` lies in its output."""
    backend: Any = context.backend
    x, ids, weights = tokens
    out = torch.full_like(x, fill)
    chosen = None if instance is None else INSTANCES[instance]
    plan = backend._ready(experts).plan
    backend.workspace.launch(plan, x, ids, weights, out, instance=chosen, received=received)
    return out


def same_bits(a: Tensor, *others: Tensor) -> bool:
    """Compare BF16 bit by bit, NaN included."""
    return all(a.shape == b.shape and torch.equal(a.view(torch.int16), b.view(torch.int16)) for b in others)
