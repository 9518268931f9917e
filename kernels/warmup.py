"""What to compile ahead of time for a configuration."""

from __future__ import annotations

from megamoe.config import MoEConfig
from megamoe.kernels import mqa_instances
from megamoe.kernels.gated import gated_rows_source
from megamoe.kernels.gemm_instances import all_instances
from megamoe.kernels.indexer_quantize import indexer_quantize_sources
from megamoe.kernels.jit import KernelSource
from megamoe.kernels.mega_moe import mega_moe_sources
from megamoe.kernels.quantize import quantize_sources
from megamoe.kernels.route import RouteShape
from megamoe.kernels.router_logits import router_logits_sources
from megamoe.kernels.sparse_attention_sm90 import sparse_attention_sources
from megamoe.kernels.topk import topk_sources

__all__ = ["warmup_sources"]


def warmup_sources(config: MoEConfig, arch: str = "sm_90a") -> list[KernelSource]:
    """Return every kernel that router, GEMMs, quantiser, mega-kernel, shared experts and indexer launch for a
    configuration; none with a trace.

    Args:
        config: its weights' format and the granularity of its activation scales decide about those of the experts;
            unquantised weights need none. An indexer needs its FP32 logits of FP8 and of MXFP4 keys, the quantisers of
            these, and the top-k.
        arch: the real architecture.
    """
    found = [*_router_sources(config, arch), *_gemm_sources(config, arch), *_logits_sources(config, arch)]
    if config.model.shared_experts:
        found.append(gated_rows_source(config.spec.activation, arch))
    if config.indexer is not None:
        found += [*indexer_quantize_sources(arch, dim=config.indexer.head_dim), *topk_sources(arch)]
    if config.attention is not None:
        attention = config.attention
        found += sparse_attention_sources(
            arch, width=attention.head_dim or (attention.kv_lora or 0) + attention.rope_dim
        )
    return found


def _router_sources(config: MoEConfig, arch: str) -> list[KernelSource]:
    shape = RouteShape.of(config.router, config.spec.num_experts, config.spec.top_k)
    if not shape.fits:
        return []
    # the weight of a layer's router is FP32
    return [*router_logits_sources(config.spec.hidden, arch=arch), shape.source(arch)]


def _gemm_sources(config: MoEConfig, arch: str) -> list[KernelSource]:
    weights = {"mxfp4": "fp4", "fp8_block": "fp8"}.get(config.spec.weight_format)
    if weights is None:
        return []
    # the second product's activations always have scales per 128
    granularities = {config.spec.act_scale, "block128"}
    instances = [i for i in all_instances() if i.format == weights and i.granularity in granularities]
    mega = mega_moe_sources(arch, act_scales={config.spec.act_scale}) if weights == "fp4" else []
    return [*(i.source(arch) for i in instances), *quantize_sources(arch), *mega]


def _logits_sources(config: MoEConfig, arch: str) -> list[KernelSource]:
    indexer = config.indexer
    if indexer is None or indexer.heads not in mqa_instances.HEADS or indexer.head_dim not in mqa_instances.HEAD_DIMS:
        return []
    size = indexer.heads, indexer.head_dim
    found = [mqa_instances.metadata_source(arch)]
    for fp4 in (False, True):
        instances = [mqa_instances.select_dense(*size, fp4, False)]
        instances += [
            mqa_instances.select_paged(*size, next_n, fp4, False) for next_n in range(1, mqa_instances.MAX_NEXT_N + 1)
        ]
        found += [instance.source(arch) for instance in dict.fromkeys(instances)]
    return found
