"""Symmetric memory through torch: what is asked of torch, in which order, and what is refused."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers_dist import run_ranks

from megamoe.comm.collectives import Collectives
from megamoe.comm.groups import RankGroup, resolve_group
from megamoe.comm.symm_mem import TorchApi, TorchSymmetricMemory
from megamoe.comm.topology import Place
from megamoe.errors import BackendUnavailable, MegaMoeError, MegaMoETimeout

CPU = torch.device("cpu")
MULTICAST, SHARED = "TORCH_SYMM_MEM_DISABLE_MULTICAST", "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"


class FakeApi(TorchApi):
    """Torch's side, on host memory; the exchange goes over the process group."""

    def __init__(self, backend: str | None = "CUDA", obeys: bool = True, multicast_pointer: int = 0) -> None:
        self.calls: list[str] = []
        self.multicast_off: list[str | None] = []
        self._backend, self._obeys, self._multicast_pointer = backend, obeys, multicast_pointer

    def backend(self, device: torch.device) -> str | None:
        return self._backend

    def has_multicast(self, device: torch.device) -> bool:
        self.multicast_off.append(os.environ.get(MULTICAST))
        return not self._obeys or os.environ.get(MULTICAST) != "1"

    def empty(self, nbytes: int, device: torch.device) -> torch.Tensor:
        self.calls.append("empty")
        self.tensor = torch.full((nbytes,), 0xA5, dtype=torch.uint8)
        return self.tensor

    def synchronize(self, device: torch.device) -> None:
        self.calls.append("synchronize")

    def rendezvous(self, tensor: torch.Tensor, group: Any) -> Any:
        assert not tensor.any(), "a peer would see memory that is not zeroed"
        self.calls.append("rendezvous")
        self.multicast_off.append(os.environ.get(MULTICAST))
        pointers: list[Any] = [tensor.data_ptr()]
        if group is not None:
            pointers = [None] * dist.get_world_size(group)
            dist.all_gather_object(pointers, tensor.data_ptr(), group=group)
        return SimpleNamespace(buffer_ptrs=pointers, multicast_ptr=self._multicast_pointer)


def on_gpus(*indices: int) -> Any:
    return lambda name, collectives: [Place("a", "boot", f"GPU-{index}", index) for index in indices]


def one_rank() -> Collectives:
    return Collectives(RankGroup(None, 0, 1, (0,)), CPU, 5.0)


@pytest.mark.parametrize("before", [None, "0", "1"])
def test_multicast_is_off_for_the_exchange_and_as_before_afterwards(
    monkeypatch: pytest.MonkeyPatch, before: str | None
) -> None:
    if before is None:
        monkeypatch.delenv(MULTICAST, raising=False)
    else:
        monkeypatch.setenv(MULTICAST, before)
    api = FakeApi()
    memory = TorchSymmetricMemory(4096, one_rank(), api=api, preflight=on_gpus(0))
    assert api.multicast_off == ["1", "1"] and os.environ.get(MULTICAST) == before
    assert api.calls == ["empty", "synchronize", "rendezvous"]
    assert memory.peer_pointers == [api.tensor.data_ptr()] and memory.tensor is api.tensor
    memory.close()
    memory.close()
    assert memory.tensor is None


@pytest.mark.parametrize(
    ("api", "words"),
    [
        (FakeApi(backend="NVSHMEM"), "backend CUDA, and this process has NVSHMEM; unset TORCH_SYMMMEM"),
        (FakeApi(backend=None), "backend CUDA, and this process has None"),
        (FakeApi(obeys=False), f"in spite of {MULTICAST}=1"),
    ],
)
def test_what_torch_cannot_give_is_refused_before_it_allocates(api: FakeApi, words: str) -> None:
    with pytest.raises(BackendUnavailable, match=words) as caught:
        TorchSymmetricMemory(4096, one_rank(), api=api, preflight=on_gpus(0))
    assert "\n" not in str(caught.value) and api.calls == []


def test_bound_multicast_is_refused() -> None:
    with pytest.raises(MegaMoeError, match="bound NVLink multicast"):
        TorchSymmetricMemory(4096, one_rank(), api=FakeApi(multicast_pointer=64), preflight=on_gpus(0))


def test_a_shared_gpu_needs_a_word_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SHARED, raising=False)
    api = FakeApi()
    with pytest.raises(BackendUnavailable, match=f"rank 1 and rank 2 both on cuda:0; .*{SHARED}=1") as caught:
        TorchSymmetricMemory(4096, one_rank(), api=api, preflight=on_gpus(1, 0, 0))
    assert "\n" not in str(caught.value) and api.calls == []
    monkeypatch.setenv(SHARED, "1")
    TorchSymmetricMemory(4096, one_rank(), api=api, preflight=on_gpus(1, 0, 0)).close()


def test_this_torch_takes_the_arguments() -> None:
    if torch.version.cuda:
        pytest.skip("a CUDA build of torch is asked by the GPU tests")
    api, device = TorchApi(), torch.device("cuda", 0)
    assert api.backend(device) is None and api.has_multicast(device) is False
    # the complaint of a CPU build comes after its arguments were taken
    with pytest.raises(RuntimeError, match="does not support device type"):
        api.empty(64, device)


def run_pair(rank: int, world_size: int, arguments: Any) -> Any:
    collectives = Collectives(resolve_group(dist.group.WORLD), CPU, 20.0)
    api = FakeApi()
    memory = TorchSymmetricMemory(1 << 16, collectives, api=api, preflight=on_gpus(0, 1))
    memory.barrier(20.0)
    seen = memory.peer_pointers
    own = memory.pointer == api.tensor.data_ptr()
    memory.close()

    class Full(FakeApi):
        def empty(self, nbytes: int, device: torch.device) -> torch.Tensor:
            if rank == 1:
                raise RuntimeError("out of memory")
            return super().empty(nbytes, device)

    full = Full()
    with pytest.raises(MegaMoeError) as caught:
        TorchSymmetricMemory(1 << 16, collectives, api=full, preflight=on_gpus(0, 1))
    assert "rendezvous" not in full.calls, "the other rank would wait in it"
    late = TorchSymmetricMemory(1 << 16, collectives, api=FakeApi(), preflight=on_gpus(0, 1))
    if rank == 0:
        with pytest.raises(MegaMoETimeout) as missing:
            late.barrier(0.5)
        return seen, own, str(caught.value), str(missing.value)
    import time

    time.sleep(2.0)
    return seen, own, str(caught.value), ""


def test_two_ranks() -> None:
    first, second = run_ranks(2, "test_comm_symm_mem:run_pair")
    assert first[0] == second[0] and first[1] and second[1]
    assert first[2] == second[2] == "rank 1: out of memory"
    assert first[3].startswith("barrier: rank 0 waited 0.5 s for rank 1")
