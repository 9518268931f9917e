"""The mega-kernel's host side without a GPU: memory of the CPU, a launch that records what it is given."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import megamoe.device_workspace as device_workspace
from megamoe.comm.base import SymmetricMemory
from megamoe.comm.collectives import Collectives
from megamoe.comm.groups import RankGroup
from megamoe.config import MoESpec
from megamoe.device_workspace import DeviceWorkspace, Gpu

__all__ = ["FakeGpu", "FakePlan", "HostMemory", "make_workspace", "mega_spec", "record_launches"]


def mega_spec(**changes: Any) -> MoESpec:
    """Return a small op that the mega-kernel runs."""
    numbers: dict[str, Any] = dict(
        hidden=256, intermediate=320, num_experts=8, top_k=2, weight_format="mxfp4", act_scale="token"
    )
    return MoESpec(**{**numbers, **changes})


class FakeGpu(Gpu):
    """Streams are numbers that the test sets; what they are asked to wait for is kept."""

    def __init__(self) -> None:
        self.current, self.capture, self.loaded = 1, 0, 0
        self.ordered: list[tuple[int, int]] = []
        self.synchronized = 0

    def load_kernels(self) -> None:
        self.loaded += 1

    def host_memory(self, nbytes: int) -> Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8)

    def stream(self) -> int:
        return self.current

    def capture_of(self, stream: int) -> int:
        return self.capture

    def order(self, first: int, then: int) -> None:
        self.ordered.append((first, then))

    def synchronize(self) -> None:
        self.synchronized += 1


class HostMemory(SymmetricMemory):
    """Symmetric memory of one rank that looks like a GPU's."""

    name = "host"

    def __init__(self, nbytes: int) -> None:
        self.rank, self.world_size, self.nbytes = 0, 1, nbytes
        self.tensor = torch.zeros(nbytes, dtype=torch.uint8)
        self.closed = False

    @property
    def peer_pointers(self) -> list[int]:
        assert self.tensor is not None
        return [self.tensor.data_ptr()]

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
        self._stash = torch.zeros(4)
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
    ) -> None:
        out.fill_(1.0)
        given = {"x": x, "ids": topk_ids, "weights": topk_weights, "out": out, "stream": stream, "received": received}
        FakePlan.launches.append({**given, "plan": self})


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


def make_workspace(specs: list[MoESpec], max_tokens: int = 64, **options: Any) -> DeviceWorkspace:
    """Return a workspace of one rank in memory of the CPU."""
    collectives = Collectives(RankGroup(None, 0, 1, (0,)), torch.device("cpu"), 3.0)
    return DeviceWorkspace(specs, collectives, max_tokens_per_rank=max_tokens, **options)
