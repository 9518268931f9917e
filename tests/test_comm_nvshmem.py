"""Symmetric memory through NVSHMEM, with a stand-in for nvshmem4py: start, groups, giving back, ending."""

from __future__ import annotations

import ctypes
import os
import secrets
import sys
import time
import warnings
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers_dist import run_ranks

from megamoe.comm import nvshmem
from megamoe.comm.collectives import Collectives
from megamoe.comm.groups import RankGroup, resolve_group
from megamoe.comm.nvshmem import NvshmemMemory, finalize
from megamoe.comm.topology import Place
from megamoe.errors import BackendUnavailable, MegaMoeError

CPU = torch.device("cpu")
MULTICAST = "NVSHMEM_DISABLE_NVLS"


class _Uid:
    def __init__(self, content: bytes) -> None:
        self.content = ctypes.create_string_buffer(content, 128)
        self.ptr = ctypes.addressof(self.content)


class FakeCore(ModuleType):
    """The functions of nvshmem.core that are used, on host memory."""

    def __init__(self, pe: int = -1, num_pes: int = 0, unreachable: int = -1) -> None:
        super().__init__("nvshmem.core")
        self.pe, self.num_pes, self.unreachable = pe, num_pes, unreachable
        self.uid = b""
        self.starts: list[tuple[int, int, str | None]] = []
        self.live: list[torch.Tensor] = []
        self.freed, self.ended = 0, 0
        self.peers: list[int] = []
        self.keep: list[torch.Tensor] = []

    def get_version(self) -> str:
        return "3.4.5"

    def init_status(self) -> int:
        return 2 if self.num_pes else 0

    def get_unique_id(self, empty: bool = False) -> _Uid:
        return _Uid(bytes(128) if empty else secrets.token_bytes(128))

    def init(self, *, device: Any, uid: _Uid, rank: int, nranks: int, initializer_method: str) -> None:
        assert initializer_method == "uid"
        self.uid = uid.content.raw
        self.starts.append((rank, nranks, os.environ.get(MULTICAST)))
        self.pe, self.num_pes = rank, nranks

    def my_pe(self) -> int:
        return self.pe

    def n_pes(self) -> int:
        return self.num_pes

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        self.live.append(torch.full(shape, 0xA5, dtype=dtype))
        return self.live[-1]

    def get_peer_tensor(self, tensor: torch.Tensor, pe: int) -> torch.Tensor:
        assert pe != self.pe, "nvshmem4py would count a second owner and never free"
        if pe == self.unreachable:
            raise Exception("Failed to retrieve peer buffer")
        self.peers.append(pe)
        self.keep.append(torch.empty_like(tensor))
        return self.keep[-1]

    def free_tensor(self, tensor: torch.Tensor) -> None:
        self.live = [other for other in self.live if other.data_ptr() != tensor.data_ptr()]
        self.freed += 1

    def finalize(self) -> None:
        self.ended += 1
        self.num_pes = 0


def install(core: FakeCore) -> FakeCore:
    """Put the stand-in where the package would be imported from, in a process that has started nothing."""
    parent = ModuleType("nvshmem")
    parent.core = core  # type: ignore[attr-defined]
    sys.modules["nvshmem"], sys.modules["nvshmem.core"] = parent, core
    nvshmem._Runtime.job, nvshmem._Runtime.ended, nvshmem._Runtime.allocations = "", False, 0
    return core


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCore:
    for name in ("nvshmem", "nvshmem.core"):
        monkeypatch.setitem(sys.modules, name, None)
    for name in ("job", "ended", "allocations"):
        monkeypatch.setattr(nvshmem._Runtime, name, getattr(nvshmem._Runtime, name))
    monkeypatch.setattr(nvshmem.atexit, "register", lambda *arguments: None)
    monkeypatch.setenv(MULTICAST, "0")
    return install(FakeCore())


def anywhere(name: str, collectives: Collectives) -> list[Place]:
    return [Place("a", "boot", f"GPU-{rank}", rank) for rank in range(collectives.world_size)]


def one_rank() -> Collectives:
    return Collectives(RankGroup(None, 0, 1, (0,)), CPU, 5.0)


def test_one_rank_starts_once_and_gives_back(fake: FakeCore) -> None:
    first = NvshmemMemory(4096, one_rank(), preflight=anywhere)
    second = NvshmemMemory(8192, one_rank(), preflight=anywhere)
    assert fake.starts == [(0, 1, "1")], "NVSHMEM starts once, with multicast off"
    assert first.tensor is not None and not first.tensor.any() and len(fake.live) == 2
    assert first.peer_pointers == [first.tensor.data_ptr()] and fake.peers == []
    for _ in range(2):
        first.close()
        second.close()
    assert fake.freed == 2 and not fake.live and first.tensor is None
    finalize(one_rank())
    finalize(one_rank())
    assert fake.ended == 1
    with pytest.raises(BackendUnavailable, match="has ended on rank 0 and starts once per process"):
        NvshmemMemory(4096, one_rank(), preflight=anywhere)


def test_a_full_heap_names_the_variable(monkeypatch: pytest.MonkeyPatch, fake: FakeCore) -> None:
    def full(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        raise Exception("Failed to allocate\nmemory")

    monkeypatch.setattr(fake, "tensor", full)
    with pytest.raises(
        MegaMoeError, match=r"heap has no 3 MiB \(Exception: Failed to allocate memory\); .*NVSHMEM_SYMMETRIC_SIZE"
    ) as caught:
        NvshmemMemory((2 << 20) + 1, one_rank(), preflight=anywhere)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("version", "extra"), [("12.8", "nvshmem12"), ("13.0", "nvshmem13"), (None, "nvshmem13")])
def test_a_missing_package_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, fake: FakeCore, version: str | None, extra: str
) -> None:
    monkeypatch.setitem(sys.modules, "nvshmem", None)
    monkeypatch.setitem(sys.modules, "nvshmem.core", None)
    monkeypatch.setattr(torch.version, "cuda", version)
    with pytest.raises(BackendUnavailable, match=rf"nvshmem4py .*pip install 'megamoe\[{extra}\]'") as caught:
        NvshmemMemory(4096, one_rank(), preflight=anywhere)
    assert "\n" not in str(caught.value)


def test_nvshmem_of_other_code_must_have_multicast_off(monkeypatch: pytest.MonkeyPatch, fake: FakeCore) -> None:
    fake.pe, fake.num_pes = 0, 1
    with pytest.raises(BackendUnavailable, match=f"started by other code without {MULTICAST}=1"):
        NvshmemMemory(4096, one_rank(), preflight=anywhere)
    assert not fake.live
    monkeypatch.setenv(MULTICAST, "1")
    NvshmemMemory(4096, one_rank(), preflight=anywhere).close()
    # what others started they end
    finalize(one_rank())
    assert not fake.starts and not fake.ended


def run_job(rank: int, world_size: int, arguments: Any) -> Any:
    core = install(FakeCore())
    collectives = Collectives(resolve_group(dist.group.WORLD), CPU, 20.0)
    memory = NvshmemMemory(4096, collectives, preflight=anywhere)
    memory.barrier(20.0)
    expected = [t.data_ptr() for t in core.keep]
    expected.insert(rank, core.live[0].data_ptr())
    assert memory.peer_pointers == expected
    memory.close()
    assert core.freed == 1
    finalize(collectives)
    return core.uid, core.peers, core.starts, core.ended


def test_ranks_start_one_job() -> None:
    results = run_ranks(3, "test_comm_nvshmem:run_job")
    assert len({uid for uid, *_ in results}) == 1 and any(results[0][0])
    for rank, (_, peers, starts, ended) in enumerate(results):
        assert starts == [(rank, 3, "1")] and ended == 1
        assert peers == [pe for pe in range(3) if pe != rank]


def run_numbers(rank: int, world_size: int, arguments: Any) -> Any:
    # started by other code, which numbered the ranks backwards
    os.environ[MULTICAST] = "1"
    core = install(FakeCore(pe=world_size - 1 - rank, num_pes=world_size))
    memory = NvshmemMemory(4096, Collectives(resolve_group(dist.group.WORLD), CPU, 20.0), preflight=anywhere)
    assert memory.pointer == core.live[0].data_ptr()
    return core.peers


def test_ranks_are_mapped_to_nvshmems_numbers() -> None:
    assert run_ranks(3, "test_comm_nvshmem:run_numbers") == [[1, 0], [2, 0], [2, 1]]


def run_subsets(rank: int, world_size: int, first: str) -> Any:
    install(FakeCore())
    small = dist.new_group([0, 1])
    everyone = Collectives(resolve_group(dist.group.WORLD), CPU, 20.0)
    pair = Collectives(resolve_group(small), CPU, 20.0) if rank < 2 else None
    groups = [pair, everyone] if first == "pair" else [everyone, pair]
    texts = []
    for group in groups:
        if group is None:
            texts.append("not in it")
            continue
        try:
            NvshmemMemory(4096, group, preflight=anywhere)
            texts.append("")
        except BackendUnavailable as error:
            texts.append(str(error))
    return texts


def test_a_group_larger_than_the_first_is_refused() -> None:
    results = run_ranks(3, "test_comm_nvshmem:run_subsets", "pair")
    assert [texts[0] for texts in results] == ["", "", "not in it"]
    assert {texts[1] for texts in results} == {results[0][1]}
    assert "NVSHMEM runs on rank 0 and not on rank 2" in results[0][1]


def test_a_part_of_the_first_group_is_refused() -> None:
    results = run_ranks(3, "test_comm_nvshmem:run_subsets", "everyone")
    for texts in results[:2]:
        assert texts[0] == ""
        assert "among which it was started, here 3, and this group holds 2, numbers [0, 1]" in texts[1]


def run_blocks(rank: int, world_size: int, arguments: Any) -> Any:
    core = install(FakeCore())
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    crossed = [dist.new_group([0, 3]), dist.new_group([1, 2])]
    NvshmemMemory(4096, Collectives(resolve_group(pairs[rank // 2]), CPU, 20.0), preflight=anywhere)
    # numbers 0 and 1 again, of two jobs
    with pytest.raises(BackendUnavailable, match="allocates on all ranks among which it was started"):
        NvshmemMemory(4096, Collectives(resolve_group(crossed[rank in (1, 2)]), CPU, 20.0), preflight=anywhere)
    return core.starts, core.uid


def test_blocks_of_ranks_are_jobs_of_their_own() -> None:
    results = run_ranks(4, "test_comm_nvshmem:run_blocks")
    assert [starts for starts, _ in results] == [[(rank % 2, 2, "1")] for rank in range(4)]
    uids = [uid for _, uid in results]
    assert uids[0] == uids[1] != uids[2] == uids[3]


def run_no_address(rank: int, world_size: int, arguments: Any) -> str:
    core = install(FakeCore(unreachable=1))
    with pytest.raises(BackendUnavailable) as caught:
        NvshmemMemory(4096, Collectives(resolve_group(dist.group.WORLD), CPU, 20.0), preflight=anywhere)
    assert core.freed == 1 and not core.live
    return str(caught.value)


def test_a_peer_without_an_address_is_named_on_every_rank() -> None:
    first, second = run_ranks(2, "test_comm_nvshmem:run_no_address")
    assert first == second and "no address for the memory of rank 1" in first and "\n" not in first


def run_missing(rank: int, world_size: int, arguments: Any) -> Any:
    core = install(FakeCore())
    # the other rank is slow to start under load; it is the wait below that has to be short
    NvshmemMemory(4096, Collectives(resolve_group(dist.group.WORLD), CPU, 20.0), preflight=anywhere)
    collectives = Collectives(resolve_group(dist.group.WORLD), CPU, 1.0)
    memory = NvshmemMemory(4096, collectives, preflight=anywhere)
    if rank == 1:
        time.sleep(5.0)
        return None
    started = time.monotonic()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        memory.close()
    with pytest.raises(MegaMoeError, match="rank 1"):
        finalize(collectives)
    return core.freed, core.ended, [str(w.message) for w in caught], time.monotonic() - started


def test_a_rank_that_does_not_come_keeps_nobody() -> None:
    freed, ended, messages, elapsed = run_ranks(2, "test_comm_nvshmem:run_missing")[0]
    assert (freed, ended) == (0, 0) and elapsed < 4.0
    assert len(messages) == 1 and "4096 bytes stay taken" in messages[0] and "rank 1" in messages[0]


def run_disorder(rank: int, world_size: int, arguments: Any) -> Any:
    core = install(FakeCore())
    collectives = Collectives(resolve_group(dist.group.WORLD), CPU, 20.0)
    memories = [NvshmemMemory(4096, collectives, preflight=anywhere) for _ in range(2)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        memories[rank].close()
    return core.freed, [str(w.message) for w in caught]


def test_ranks_that_close_different_memory_are_told() -> None:
    for freed, messages in run_ranks(2, "test_comm_nvshmem:run_disorder"):
        assert freed == 0 and "close different memory (serials [1, 2])" in messages[0]
