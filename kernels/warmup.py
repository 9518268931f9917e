"""What to compile ahead of time for a configuration."""

from __future__ import annotations

from megamoe.config import MoEConfig
from megamoe.kernels.gemm_instances import all_instances
from megamoe.kernels.jit import KernelSource
from megamoe.kernels.mega_moe import mega_moe_sources
from megamoe.kernels.quantize import quantize_sources

__all__ = ["warmup_sources"]


def warmup_sources(config: MoEConfig, arch: str = "sm_90a") -> list[KernelSource]:
    """Return every kernel that grouped GEMMs, quantiser and mega-kernel launch for a configuration; none with a trace.

    Args:
        config: its weights' format and the granularity of its activation scales decide; unquantised weights need none.
        arch: the real architecture.
    """
    weights = {"mxfp4": "fp4", "fp8_block": "fp8"}.get(config.spec.weight_format)
    if weights is None:
        return []
    # the second product's activations always have scales per 128
    granularities = {config.spec.act_scale, "block128"}
    instances = [i for i in all_instances() if i.format == weights and i.granularity in granularities]
    mega = mega_moe_sources(arch, act_scales={config.spec.act_scale}) if weights == "fp4" else []
    return [*(i.source(arch) for i in instances), *quantize_sources(arch), *mega]
