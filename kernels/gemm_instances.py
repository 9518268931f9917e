"""The instances of the grouped GEMM kernels: what can be launched, how it is chosen, how each is compiled."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from megamoe.kernels.jit import KernelSource

__all__ = [
    "MAX_GROUPS",
    "GemmInstance",
    "all_instances",
    "all_sources",
    "select_instance",
]

MAX_GROUPS = 1024  # kMaxGroups of scheduler/grouped_rows.cuh

_FORMATS = ("fp4", "fp8")
_GRANULARITIES = ("token", "block128")
_BLOCK_K = 128
_RS_BLOCK_BYTES = 64 * 64 + 64 * 2  # codes and relative exponents of 64 rows x 128 of K
_RS_WARPGROUPS, _RS_STEPS = 4, 2
_SS_ASIDE_BYTES = 32  # kSsAsideBytes of impls/sm90_grouped_gemm_ss.cuh
_RS_ROWS = (8, 16, 24, 32, 48)
# Above it a tile of 256 rows decodes half as often per product; below, such a tile would be mostly empty.
_WIDE_ROWS = 200


@dataclass(frozen=True)
class GemmInstance:
    """One compiled form of the grouped GEMM.

    Attributes:
        kind: "ss" (tokens on M, both operands from shared memory) or "rs" (weights on M, from registers; FP4 only).
        tile_rows, tile_features: of D, written by one CTA at a time.
        format: of the weights, "fp4" or "fp8".
        granularity: of the activation scales, "token" or "block128".
        stages: slots of the ring in shared memory.
    """

    kind: str
    tile_rows: int
    tile_features: int
    format: str
    granularity: str
    stages: int

    @property
    def name(self) -> str:
        """A readable name, also that of the entry function."""
        tile = f"{self.tile_rows}x{self.tile_features}"
        return f"sm90_grouped_gemm_{self.format}_{self.granularity}_{self.kind}_{tile}"

    @property
    def layout(self) -> str | None:
        """Layout of the packed weights that it reads; None for FP8."""
        return f"sm90_{self.kind}" if self.format == "fp4" else None

    @property
    def threads(self) -> int:
        """Threads per block: the math warpgroups and those that load or decode."""
        if self.kind == "rs":
            return 128 * (_RS_WARPGROUPS + 1)
        return 128 * (2 + (2 if self.format == "fp4" else 1))

    def shared_bytes(self, num_groups: int) -> int:
        """Return the dynamic shared memory of a launch, bytes: kSmemBytes of mma/policy.cuh and the groups' table."""
        scales = -(-(self.tile_rows + 4) // 32) * 128 if self.granularity == "block128" else 0
        rows = self.tile_rows * _BLOCK_K
        if self.kind == "rs":
            slot = _RS_STEPS * (rows + _RS_WARPGROUPS * _RS_BLOCK_BYTES + scales)
            ring = self.stages * (-(-slot // 1024) * 1024 + 16)
        else:
            ring = self.stages * (rows + self.tile_features * _BLOCK_K + scales + 16)
            ring += 8 * self.tile_features * 4 if self.format == "fp4" else 0
            ring += _SS_ASIDE_BYTES
        return ring + 4 * (3 * num_groups + 1)

    def source(self, arch: str = "sm_90a") -> KernelSource:
        """Return the kernel to compile."""
        return _source(self, arch)


@lru_cache(maxsize=256)
def _source(instance: GemmInstance, arch: str) -> KernelSource:
    scale = "kToken" if instance.granularity == "token" else "kBlock128"
    if instance.kind == "rs":
        constants = f"constexpr int kTileRows = {instance.tile_rows}, kStages = {instance.stages};"
        policy = f"RsPolicy<ScaleGranularity::{scale}, kTileRows, kStages>"
    else:
        row_blocks, column_blocks = instance.tile_rows // 128, instance.tile_features // 128
        constants = (
            f"constexpr int kRowBlocks = {row_blocks}, kColumnBlocks = {column_blocks}, kStages = {instance.stages};"
        )
        weights = "kFp4" if instance.format == "fp4" else "kFp8"
        policy = f"SsPolicy<WeightFormat::{weights}, ScaleGranularity::{scale}, kRowBlocks, kColumnBlocks, kStages>"
    aside = " + megamoe::impls::kSsAsideBytes" if instance.kind == "ss" else ""
    code = f"""#include "megamoe/impls/sm90_grouped_gemm_{instance.kind}.cuh"
using namespace megamoe::mma;
{constants}
constexpr int kThreads = {instance.threads};
using Policy = {policy};
static_assert(Policy::kSmemBytes{aside} == {instance.shared_bytes(0) - 4}, "the host's formula of shared memory");
static_assert(sizeof(megamoe::impls::GroupedGemmArgs) == 384, "the host's bytes of the arguments");
extern "C" __global__ void __launch_bounds__(kThreads, 1)
{instance.name}(const __grid_constant__ megamoe::impls::GroupedGemmArgs args) {{
    extern __shared__ __align__(1024) uint8_t smem[];
    megamoe::impls::sm90_grouped_gemm_{instance.kind}<Policy>(args, smem);
}}
"""
    return KernelSource(
        name=instance.name,
        code=code,
        entry=instance.name,
        arch=arch,
        dynamic_shared_bytes=instance.shared_bytes(MAX_GROUPS),
    )


def _instances() -> Iterator[GemmInstance]:
    for granularity in _GRANULARITIES:
        for rows in _RS_ROWS:
            yield GemmInstance("rs", rows, 256, "fp4", granularity, 4 if rows == 48 else 5)
        yield GemmInstance("ss", 128, 256, "fp4", granularity, 4)
        yield GemmInstance("ss", 256, 128, "fp4", granularity, 4)
        yield GemmInstance("ss", 128, 256, "fp8", granularity, 4)


_ALL = {(i.format, i.granularity, i.kind, i.tile_rows): i for i in _instances()}


def all_instances() -> list[GemmInstance]:
    """Return every instance that can be launched."""
    return list(_ALL.values())


def all_sources(arch: str = "sm_90a") -> list[KernelSource]:
    """Return every kernel that the grouped GEMM can launch."""
    return [instance.source(arch) for instance in all_instances()]


def select_instance(
    format: str, granularity: str, rows_per_group_hint: int, masked: bool, *, layout: str | None = None
) -> GemmInstance:
    """Choose the instance for a problem, by the measurements in benchmarks/notes/gemm-sm90.md.

    Args:
        format: of the weights, "fp4" or "fp8".
        granularity: of the activation scales, "token" or "block128".
        rows_per_group_hint: rows that a group has, about; it decides speed, never the result.
        masked: whether each group has its own padded matrix. The same instances serve both: the hint is the count that
            the caller expects, and not the padded size.
        layout: of the packed FP4 weights at hand, "sm90_rs" or "sm90_ss", which only their kernels read; None chooses
            among both.

    Raises:
        ValueError: an unknown format, granularity or layout.
    """
    if format not in _FORMATS:
        raise ValueError(f"format: must be one of {', '.join(_FORMATS)}, got '{format}'")
    if granularity not in _GRANULARITIES:
        raise ValueError(f"granularity: must be one of {', '.join(_GRANULARITIES)}, got '{granularity}'")
    if layout not in ((None, "sm90_rs", "sm90_ss") if format == "fp4" else (None,)):
        raise ValueError(f"layout: must be sm90_rs or sm90_ss for fp4 weights and None for others, got '{layout}'")
    rows = max(1, rows_per_group_hint)
    if format == "fp8":
        return _ALL[format, granularity, "ss", 128]
    if layout == "sm90_rs" or (layout is None and rows <= _RS_ROWS[-1]):
        tile = next((tile for tile in _RS_ROWS if rows <= tile), _RS_ROWS[-1])
        return _ALL[format, granularity, "rs", tile]
    return _ALL[format, granularity, "ss", 256 if rows >= _WIDE_ROWS else 128]
