"""Which symmetric memory a group gets, and which groups are refused before anything is allocated."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers_dist import run_ranks

from megamoe.comm import topology
from megamoe.comm.choice import allocate, choose
from megamoe.comm.collectives import Collectives
from megamoe.comm.groups import RankGroup, resolve_group
from megamoe.comm.local import LocalMemory
from megamoe.comm.shm import ShmMemory
from megamoe.comm.topology import Place, check_peer_access, shared_gpus, unreachable
from megamoe.errors import BackendUnavailable, ConfigError, MegaMoeError, MegaMoETimeout

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def on_host(host: str, index: int, boot: str = "boot") -> Place:
    return Place(host, boot, f"GPU-{host}-{index}", index)


def group_of(world_size: int, first: int = 0) -> RankGroup:
    return RankGroup(None, 0, world_size, tuple(range(first, first + world_size)))


@pytest.mark.parametrize(
    ("comm", "device", "world_size", "expected"),
    [
        ("auto", CPU, 1, "local"),
        ("auto", CPU, 4, "shm"),
        ("shm", CPU, 1, "local"),
        ("shm", CPU, 2, "shm"),
        ("auto", GPU, 1, "local"),
        ("auto", GPU, 8, "symm_mem"),
        ("symm_mem", GPU, 2, "symm_mem"),
        ("nvshmem", GPU, 2, "nvshmem"),
        ("nvshmem", GPU, 1, "local"),
        ("local", GPU, 1, "local"),
    ],
)
def test_the_device_and_the_ranks_decide(comm: str, device: torch.device, world_size: int, expected: str) -> None:
    assert choose(comm, device, world_size) == expected


@pytest.mark.parametrize(
    ("comm", "device", "world_size", "words"),
    [
        ("symm_mem", CPU, 2, "on a CPU choose auto, local, shm, got symm_mem"),
        ("shm", GPU, 2, "on a GPU choose auto, local, symm_mem, nvshmem, got shm"),
        ("local", CPU, 4, "local serves one rank, this group has 4; use shm"),
        ("local", GPU, 4, "local serves one rank, this group has 4; use symm_mem"),
        ("auto", torch.device("meta"), 1, "no symmetric memory on meta"),
    ],
)
def test_what_cannot_serve_is_refused(comm: str, device: torch.device, world_size: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        choose(comm, device, world_size)
    assert "parallel.comm" in str(caught.value) and "\n" not in str(caught.value)


def test_one_rank_gets_zeroed_memory() -> None:
    memory = allocate("auto", 4096, Collectives(group_of(1), CPU, 5.0))
    assert isinstance(memory, LocalMemory) and memory.pointer % 64 == 0
    import ctypes

    assert ctypes.string_at(memory.pointer, 4096) == bytes(4096)
    memory.close()
    memory.close()


@pytest.mark.parametrize("holes", [[(0, 1)], [(1, 0)], [(0, 2), (3, 1)]])
def test_pairs_without_peer_access_are_named(holes: list[tuple[int, int]]) -> None:
    places = [on_host("a", index) for index in range(4)]
    rows: list[list[bool | None]] = [[True] * 4 for _ in range(4)]
    for a, b in holes:
        rows[a][b] = False
    text = unreachable("symm_mem", places, rows, group_of(4, first=4))
    assert text is not None
    for a, b in ((min(pair), max(pair)) for pair in holes):
        assert f"rank {a} (global rank {a + 4}) (cuda:{a}) and rank {b} (global rank {b + 4}) (cuda:{b})" in text
    assert text.count(" and rank ") == len(holes)


def test_a_long_list_of_pairs_is_cut() -> None:
    places = [on_host("a", index) for index in range(8)]
    rows: list[list[bool | None]] = [[a == b for b in range(8)] for a in range(8)]
    text = unreachable("nvshmem", places, rows, group_of(8))
    assert text is not None and "and 20 more" in text


def test_unseen_gpus_are_left_to_the_driver() -> None:
    places = [on_host("a", 0), on_host("a", 1)]
    assert unreachable("symm_mem", places, [[True, None], [None, True]], group_of(2)) is None


def test_ranks_on_one_gpu_are_seen() -> None:
    assert shared_gpus([on_host("a", 0), on_host("a", 1), on_host("a", 2)]) == []
    assert shared_gpus([on_host("a", 0), on_host("a", 1), on_host("a", 0)]) == [(0, 2)]
    # each rank sees its own GPU alone: torch goes by the index
    isolated = [Place("a", "boot", "GPU-x", 0), Place("a", "boot", "GPU-y", 0)]
    assert shared_gpus(isolated) == [(0, 1)]


def test_cuda_is_asked_by_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []

    def can_access(own: int, peer: int) -> bool:
        asked.append((own, peer))
        return False

    monkeypatch.setattr(topology, "_uuid", lambda index: f"GPU-a-{index}")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", can_access)
    own = on_host("a", 1)
    assert topology.reaches(own, own) is True and not asked
    # the peer counts its GPUs otherwise: its UUID is what counts
    assert topology.reaches(own, Place("a", "boot", "GPU-a-2", 0)) is False and asked == [(1, 2)]
    assert topology.reaches(own, Place("a", "boot", "GPU-a-7", 0)) is None


def run_preflight(rank: int, world_size: int, arguments: Any) -> Any:
    hosts, holes = arguments
    collectives = Collectives(resolve_group(dist.group.WORLD), CPU, 30.0)
    own = Place(*hosts[rank], f"GPU-{rank}", rank)
    probed: list[str] = []

    def probe(a: Place, b: Place) -> bool:
        probed.append(b.gpu)
        return (a.index, b.index) not in holes

    try:
        places = check_peer_access("symm_mem", collectives, find=lambda device: own, probe=probe)
    except BackendUnavailable as error:
        return str(error), probed
    return [place.gpu for place in places], probed


def test_every_rank_hears_the_same_of_a_broken_pair() -> None:
    one = [("a", "boot")] * 3
    everyone = ["GPU-0", "GPU-1", "GPU-2"]
    for seen, probed in run_ranks(3, "test_comm_choice:run_preflight", (one, [])):
        assert seen == everyone and probed == everyone
    texts = {text for text, _ in run_ranks(3, "test_comm_choice:run_preflight", (one, [(2, 1)]))}
    assert len(texts) == 1 and "rank 1 (cuda:1) and rank 2 (cuda:2)" in texts.pop()


@pytest.mark.parametrize("other", [("b", "boot"), ("a", "another boot")])
def test_a_group_across_hosts_is_refused(other: tuple[str, str]) -> None:
    hosts = [("a", "boot"), other]
    results = run_ranks(2, "test_comm_choice:run_preflight", (hosts, []))
    for text, probed in results:
        assert f"all ranks of a group on one host, got rank 0 on a and rank 1 on {other[0]}" in text
        assert not probed and "\n" not in text


def run_barrier(rank: int, world_size: int, arguments: Any) -> Any:
    collectives = Collectives(resolve_group(dist.group.WORLD), CPU, 30.0)
    memory = allocate("auto", 1 << 16, collectives)
    assert isinstance(memory, ShmMemory)
    memory.barrier(20.0)
    with pytest.raises(MegaMoeError, match="got 65536 bytes on rank 0 and 131072 on rank 2"):
        allocate("auto", 1 << 17 if rank == 2 else 1 << 16, collectives)
    if rank == 1:
        # comes later than the others wait
        import time

        time.sleep(4.0)
        return ""
    with pytest.raises(MegaMoETimeout) as caught:
        memory.barrier(1.0)
    return str(caught.value)


def test_a_barrier_keeps_its_own_bound_and_names_the_rank() -> None:
    first, _, third = run_ranks(3, "test_comm_choice:run_barrier")
    for text in (first, third):
        assert text.startswith("barrier: ") and "rank 1, which did not answer" in text


@pytest.mark.gpu
def test_one_rank_on_a_gpu() -> None:
    memory = allocate("auto", (1 << 20) + 3, Collectives(group_of(1), GPU, 5.0))
    assert isinstance(memory, LocalMemory) and memory.tensor is not None
    assert memory.pointer % 64 == 0 and memory.pointer == memory.tensor.data_ptr()
    assert memory.tensor.numel() == (1 << 20) + 3 and not memory.tensor.any()
    memory.barrier(1.0)
    memory.close()
    memory.close()


@pytest.mark.gpu
def test_threads_share_a_gpu() -> None:
    memories = LocalMemory.allocate_threads(4096, 3, GPU)
    assert len({memory.pointer for memory in memories}) == 3
    assert all(memory.peer_pointers == memories[0].peer_pointers for memory in memories)
    for memory in memories:
        memory.close()
