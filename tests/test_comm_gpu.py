"""Symmetric memory on GPUs: kernels of every rank write and read the memory of every other by its address.

Ranks share GPU 0 where there are fewer GPUs than ranks.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers_dist import run_ranks

from megamoe.comm.base import SymmetricMemory
from megamoe.comm.choice import allocate
from megamoe.comm.collectives import Collectives
from megamoe.comm.groups import resolve_group
from megamoe.errors import BackendUnavailable

pytestmark = pytest.mark.gpu

SHARED = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
WORDS = 1 << 16  # of one rank's part of a buffer, 32 bits each
ROUNDS = 20
MIB = 1 << 20

# Plain pointers, as the mega-kernel takes them. A part is filled with words that tell writer, owner and place.
KERNELS = """
extern "C" __global__ void write_words(unsigned* words, unsigned count, unsigned seed) {
    for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x)
        words[i] = seed * 2654435761u + i;
    __threadfence_system();
}
extern "C" __global__ void count_wrong(const unsigned* words, unsigned count, unsigned seed, unsigned* wrong) {
    for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x)
        if (words[i] != seed * 2654435761u + i) atomicAdd(wrong, 1u);
}
"""


@cache
def kernel(name: str) -> Any:
    from cuda.core import Program, ProgramOptions

    return Program(KERNELS, code_type="c++", options=ProgramOptions(arch="sm_90")).compile("cubin").get_kernel(name)


class _Stream:
    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, torch.cuda.current_stream().cuda_stream)


def run_kernel(name: str, *arguments: Any) -> None:
    from cuda.core import Device, LaunchConfig, launch

    device = Device(torch.cuda.current_device())
    device.set_current()
    launch(device.create_stream(_Stream()), LaunchConfig(grid=16, block=256), kernel(name), *arguments)


def write_words(address: int, seed: int) -> None:
    import numpy

    run_kernel("write_words", address, numpy.uint32(WORDS), numpy.uint32(seed))


def wrong_words(address: int, seed: int) -> int:
    import numpy

    wrong = torch.zeros(1, dtype=torch.int32, device="cuda")
    run_kernel("count_wrong", address, numpy.uint32(WORDS), numpy.uint32(seed), wrong.data_ptr())
    return int(wrong.item())


def exchange(memory: SymmetricMemory) -> None:
    """Every rank writes its part of every buffer, then all parts of all buffers are read on every rank."""
    part = WORDS * 4
    tensor = memory.tensor
    assert tensor is not None and tensor.numel() == memory.nbytes and tensor.data_ptr() == memory.pointer
    assert not tensor.any(), "memory starts zeroed"
    memory.barrier(30.0)
    for owner, address in enumerate(memory.peer_pointers):
        assert address % 64 == 0
        write_words(address + memory.rank * part, 100 * memory.rank + owner + 1)
    torch.cuda.synchronize()
    memory.barrier(30.0)
    for owner, address in enumerate(memory.peer_pointers):
        for writer in range(memory.world_size):
            wrong = wrong_words(address + writer * part, 100 * writer + owner + 1)
            assert wrong == 0, f"rank {memory.rank}: {wrong} words of rank {writer} in the buffer of rank {owner}"
    memory.barrier(30.0)


def settle(rank: int) -> torch.device:
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def used_bytes(memory_barrier: Any) -> int:
    """Return the bytes in use on the GPU while no rank allocates."""
    torch.cuda.synchronize()
    memory_barrier()
    free, total = torch.cuda.mem_get_info()
    memory_barrier()
    return total - free


def run_backend(rank: int, world_size: int, comm: str) -> int:
    collectives = Collectives(resolve_group(dist.group.WORLD), settle(rank), 40.0)
    nbytes = world_size * WORDS * 4
    if comm == "symm_mem" and world_size > torch.cuda.device_count():
        os.environ.pop(SHARED, None)
        with pytest.raises(BackendUnavailable, match=f"both on cuda:0; .*{SHARED}=1"):
            allocate(comm, nbytes, collectives)
        os.environ[SHARED] = "1"
    first = allocate(comm, nbytes, collectives)
    assert first.name == comm
    pointers = first.peer_pointers
    exchange(first)
    second = allocate(comm, nbytes, collectives)
    exchange(second)
    assert first.peer_pointers == pointers and not set(pointers) & set(second.peer_pointers)
    first.close()
    second.close()
    if comm == "nvshmem":
        from megamoe.comm.nvshmem import finalize

        finalize(collectives)
    return len(set(pointers))


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("comm", ["symm_mem", "nvshmem"])
def test_every_rank_addresses_every_other(comm: str, world_size: int) -> None:
    if comm == "nvshmem":
        pytest.importorskip("nvshmem.core")
    distinct = run_ranks(world_size, "test_comm_gpu:run_backend", comm, timeout_s=50)
    assert distinct == [world_size] * world_size


def run_rounds(rank: int, world_size: int, comm: str) -> list[int]:
    os.environ[SHARED] = "1"
    collectives = Collectives(resolve_group(dist.group.WORLD), settle(rank), 40.0)
    used = []
    for _ in range(ROUNDS):
        memory = allocate(comm, 64 * MIB, collectives)
        memory.close()
        used.append(used_bytes(collectives.barrier))
    return used


@pytest.mark.parametrize("comm", ["symm_mem", "nvshmem"])
def test_opening_and_closing_does_not_grow(comm: str) -> None:
    if comm == "nvshmem":
        pytest.importorskip("nvshmem.core")
    for used in run_ranks(2, "test_comm_gpu:run_rounds", comm, timeout_s=50):
        # the first round starts the backend, which keeps some
        growth = used[-1] - used[1]
        assert growth < 8 * MIB, f"{growth / MIB:.1f} MiB more after {ROUNDS} rounds: {[u // MIB for u in used]}"


def run_pairs(rank: int, world_size: int, arguments: Any) -> None:
    os.environ[SHARED] = "1"
    device = settle(rank)
    # pairs of neighbours, then pairs across: the memory of both must live side by side
    groups = [[dist.new_group([0, 1]), dist.new_group([2, 3])], [dist.new_group([0, 2]), dist.new_group([1, 3])]]
    mine = [groups[0][rank // 2], groups[1][rank % 2]]
    memories = [allocate("auto", 2 * WORDS * 4, Collectives(resolve_group(group), device, 40.0)) for group in mine]
    for memory in memories:
        assert memory.name == "symm_mem" and memory.world_size == 2
        exchange(memory)
    for memory in memories:
        memory.close()


def test_subset_groups_over_torch() -> None:
    run_ranks(4, "test_comm_gpu:run_pairs", timeout_s=50)


def run_nccl(rank: int, world_size: int, rendezvous: str) -> None:
    device = settle(rank)
    dist.destroy_process_group()
    dist.init_process_group("nccl", init_method=rendezvous, rank=rank, world_size=world_size, device_id=device)
    memory = allocate("auto", world_size * WORDS * 4, Collectives(resolve_group(dist.group.WORLD), device, 40.0))
    exchange(memory)
    memory.close()


def test_over_nccl(tmp_path: Path) -> None:
    count = torch.cuda.device_count()
    if count < 2:
        pytest.skip("NCCL takes one rank per GPU and this machine has one GPU")
    run_ranks(min(count, 4), "test_comm_gpu:run_nccl", f"file://{tmp_path / 'nccl'}", timeout_s=50)
