"""The instances of the MQA logits kernels: what can be launched, how it is chosen, how each is compiled."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from megamoe.kernels.jit import KernelSource

__all__ = [
    "HEADS",
    "HEAD_DIMS",
    "MAX_NEXT_N",
    "PAGES",
    "MqaInstance",
    "all_instances",
    "all_sources",
    "metadata_source",
    "select_dense",
    "select_paged",
]

HEADS = (8, 16, 32, 64)
HEAD_DIMS = (32, 64, 128)
PAGES = (16, 32, 64, 128, 256)
MAX_NEXT_N = 4
METADATA_THREADS = 256
METADATA_ARGS = struct.Struct("<2Q3i4x")  # MqaMetadataArgs of impls/mqa_logits_metadata.cuh
ARGS_BYTES = 576

_COLUMNS = 128  # of a unit: queries x heads
_SHARED_BYTES = 227 * 1024


@dataclass(frozen=True)
class MqaInstance:
    """One compiled form; the fields are the parameters of `MqaPolicy` (impls/mqa_logits_args.cuh), in order.

    Attributes:
        heads, head_dim: of the queries.
        queries: rows of queries in a unit of `queries * heads` columns.
        groups: units of queries that a warpgroup multiplies with the same keys.
        warpgroups: that multiply.
        shared: whether these have own queries and read the same keys, rather than divide the keys.
        tiles: of 64 keys, of a warpgroup in a slot of the ring.
        accumulators: 2 sums up one unit while the next is multiplied.
        paged, fp4, bf16: what is read, and what is written.
    """

    heads: int
    head_dim: int
    queries: int
    groups: int
    warpgroups: int
    shared: bool
    tiles: int
    accumulators: int
    paged: bool
    fp4: bool
    bf16: bool

    @property
    def name(self) -> str:
        """A readable name, also that of the entry function."""
        kind = f"{'fp4' if self.fp4 else 'fp8'}_{'paged_' if self.paged else ''}mqa_logits"
        how = f"q{self.queries}x{self.groups}_{'shared' if self.shared else 'split'}{self.warpgroups}"
        how += f"_t{self.tiles}a{self.accumulators}"
        return f"sm90_{kind}_{'bf16' if self.bf16 else 'f32'}_h{self.heads}_d{self.head_dim}_{how}"

    @property
    def rows(self) -> int:
        """Rows of queries that a CTA works on at a time."""
        return self.queries * self.groups * (self.warpgroups if self.shared else 1)

    @property
    def keys(self) -> int:
        """Keys in a slot of the ring."""
        return 64 * self.tiles * (1 if self.shared else self.warpgroups)

    @property
    def threads(self) -> int:
        """Threads per block."""
        return 128 * (self.warpgroups + 1)

    def _fixed_bytes(self) -> int:
        rows, heads = self.rows, self.heads
        return 2 * (rows * heads * 128 + rows * heads * 4 + rows * 16 + 8) + 4 * 8 + 16 + self.threads // 32 * 8

    @property
    def _slot_bytes(self) -> int:
        return self.keys * (self.head_dim // 2 if self.fp4 else 128) + self.keys * 4 + 16

    @property
    def stages(self) -> int:
        """Slots of the ring: as many as shared memory holds, at most 12."""
        return min(12, (_SHARED_BYTES - self._fixed_bytes()) // self._slot_bytes)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a launch, bytes: MqaMemory::kBytes of impls/sm90_mqa_logits.cuh."""
        return self._fixed_bytes() + self.stages * self._slot_bytes

    def source(self, arch: str = "sm_90a") -> KernelSource:
        """Return the kernel to compile."""
        return _source(self, arch)


@lru_cache(maxsize=256)
def _source(instance: MqaInstance, arch: str) -> KernelSource:
    numbers = (
        *(instance.heads, instance.head_dim, instance.queries, instance.groups, instance.warpgroups, instance.shared),
        *(instance.tiles, instance.accumulators, instance.stages, instance.paged, instance.fp4, instance.bf16),
    )
    parameters = ", ".join(str(n).lower() for n in numbers)
    code = f"""#include "megamoe/impls/sm90_mqa_logits.cuh"
using namespace megamoe::impls;
using Policy = MqaPolicy<{parameters}>;
static_assert(MqaMemory<Policy>::kBytes == {instance.shared_bytes}, "the host's formula of shared memory");
static_assert(Policy::kThreads == {instance.threads} && Policy::kRows == {instance.rows}, "the host's block");
static_assert(Policy::kKeys == {instance.keys}, "the host's slot");
static_assert(sizeof(MqaArgs) == {ARGS_BYTES}, "the host's bytes of the arguments");
extern "C" __global__ void __launch_bounds__(Policy::kThreads, 1)
{instance.name}(const __grid_constant__ MqaArgs args) {{
    extern __shared__ __align__(1024) uint8_t smem[];
    sm90_mqa_logits<Policy>(args, smem);
}}
"""
    return KernelSource(
        name=instance.name,
        code=code,
        entry=instance.name,
        arch=arch,
        dynamic_shared_bytes=instance.shared_bytes,
    )


@lru_cache
def metadata_source(arch: str = "sm_90a") -> KernelSource:
    """Return the kernel that divides the batches of the paged logits among CTAs."""
    name = "sm90_paged_mqa_logits_metadata"
    code = f"""#include "megamoe/impls/mqa_logits_metadata.cuh"
extern "C" __global__ void __launch_bounds__({METADATA_THREADS})
{name}(const __grid_constant__ megamoe::impls::MqaMetadataArgs args) {{
    static_assert(sizeof(args) == {METADATA_ARGS.size}, "what the host packs");
    megamoe::impls::mqa_logits_metadata<{METADATA_THREADS}>(args);
}}
"""
    return KernelSource(name=name, code=code, entry=name, arch=arch)


def select_dense(heads: int, head_dim: int, fp4: bool, bf16: bool) -> MqaInstance:
    """Choose the instance for logits over neighbouring keys, by the measurements in benchmarks/notes/mqa-logits.md."""
    queries = min(8, _COLUMNS // heads)
    if fp4:
        return MqaInstance(heads, head_dim, queries, 1, 2, False, 2, 2, False, True, bf16)
    if (heads, head_dim, bf16) == (64, 128, False):
        return MqaInstance(heads, head_dim, 4, 1, 2, True, 1, 1, False, False, bf16)
    groups = 2 if heads >= 32 else 1  # of few heads one unit has enough rows, and more would be spilled
    return MqaInstance(heads, head_dim, queries, groups, 2, True, 2 // groups, 2, False, False, bf16)


def select_paged(heads: int, head_dim: int, next_n: int, fp4: bool, bf16: bool) -> MqaInstance:
    """Choose the instance for paged logits: `next_n` rows of a batch are one block of rows."""
    fits = next_n * heads <= _COLUMNS
    queries = next_n if fits else -(-next_n // 2)
    return MqaInstance(heads, head_dim, queries, 1, 2, not fits, 2, 2, True, fp4, bf16)


def _instances() -> Iterator[MqaInstance]:
    for heads in HEADS:
        for head_dim in HEAD_DIMS:
            for fp4 in (False, True):
                for bf16 in (False, True):
                    yield select_dense(heads, head_dim, fp4, bf16)
                    for next_n in range(1, MAX_NEXT_N + 1):
                        yield select_paged(heads, head_dim, next_n, fp4, bf16)


def all_instances() -> list[MqaInstance]:
    """Return every instance that can be launched."""
    return list(dict.fromkeys(_instances()))


def all_sources(arch: str = "sm_90a") -> list[KernelSource]:
    """Return every kernel that MQA logits can launch."""
    return [metadata_source(arch), *(instance.source(arch) for instance in all_instances())]
