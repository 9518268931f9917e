"""What to compile ahead of time for a configuration."""

from __future__ import annotations

from megamoe.config import MoEConfig
from megamoe.kernels.gemm_instances import all_instances
from megamoe.kernels.indexer_quantize import indexer_quantize_sources
from megamoe.kernels.jit import KernelSource
from megamoe.kernels.quantize import quantize_sources
from megamoe.kernels.topk import topk_sources

__all__ = ["warmup_sources"]


def warmup_sources(config: MoEConfig, arch: str = "sm_90a") -> list[KernelSource]:
    """Return every kernel that a configuration's layers can launch through the GEMMs, the quantisers and the top-k.

    Args:
        config: its weights' format, the granularity of its activation scales and its indexer decide; unquantised
            weights need none.
        arch: the real architecture.
    """
    found: list[KernelSource] = []
    weights = {"mxfp4": "fp4", "fp8_block": "fp8"}.get(config.spec.weight_format)
    if weights is not None:
        # the second product's activations always have scales per 128
        granularities = {config.spec.act_scale, "block128"}
        instances = [i for i in all_instances() if i.format == weights and i.granularity in granularities]
        found += [*(i.source(arch) for i in instances), *quantize_sources(arch)]
    if config.indexer is not None:
        found += [*indexer_quantize_sources(arch, dim=config.indexer.head_dim), *topk_sources(arch)]
    return found
