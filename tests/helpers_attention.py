"""Small attention layers in FP32, and the float64 oracle of them over a padded batch."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

import torch
from torch import Tensor

from megamoe.config import MoEConfig
from megamoe.layers.compressed_attention import CompressedAttention
from megamoe.layers.indexer_attention import IndexerAttention
from megamoe.testing.attention_oracle import AttentionTruth, attention_oracle, compressed_attention_oracle

Layer = TypeVar("Layer", bound=torch.nn.Module)

# attention section; the model that attends like this is the id of the case
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "deepseek_v32": (
        {"kind": "mla", "heads": 3, "kv_lora": 20, "nope_dim": 12, "value_dim": 10, "yarn_factor": 40.0,
         "yarn_context": 64, "yarn_mscale": 1.0},
        {"rope": "half"},
    ),
    "glm": ({"kind": "mla", "heads": 2, "kv_lora": 24, "nope_dim": 8, "value_dim": 16, "rope_theta": 1e6},
            {"rope": "interleaved"}),
    "gqa": ({"kind": "gqa", "heads": 6, "kv_heads": 2, "head_dim": 14, "rope": "half"}, {"rope": "half"}),
}  # fmt: skip
V4 = (
    {"kind": "compressed", "heads": 4, "head_dim": 14, "window": 6, "output_groups": 2, "output_lora": 10,
     "yarn_factor": 16.0, "yarn_context": 64},
    {"rope": "interleaved"},
)  # fmt: skip
TOP_K = 5
HIDDEN = 32
# FP32 against float64: some hundred roundings of values around 1
TOLERANCE = 1e-5


def config_of(name: str = "deepseek_v32", *, attention: Any = None, indexer: Any = None, **model: Any) -> MoEConfig:
    """Return a small configuration of a kind, with keys changed."""
    base, index = V4 if name == "deepseek_v4" else KINDS[name]
    return MoEConfig.from_dict(
        {
            "model": {"hidden": HIDDEN, "intermediate": 32, "num_experts": 4, "top_k": 2, "dtype": "float32", **model},
            "router": {"score": "softmax"},
            "indexer": {"heads": 4, "head_dim": 16, "top_k": TOP_K, **index, **(indexer or {})},
            "attention": {
                "q_lora": 24,
                "rope_dim": 8,
                "page_size": 4,
                "rope_theta": 100.0,
                **base,
                **(attention or {}),
            },
        }
    )


def _filled(layer: Layer) -> Layer:
    """Let every parameter matter: no norm weight is 1, no bias or sink 0."""
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if "norm" in name or "bias" in name or "sinks" in name:
                parameter.add_(0.3 * torch.randn(parameter.shape))
    return layer


def layer_of(config: MoEConfig, seed: int = 0) -> IndexerAttention:
    """Return a layer in which every parameter matters."""
    torch.manual_seed(seed)
    return _filled(IndexerAttention(config))


def compressed_layer_of(config: MoEConfig, seed: int = 0) -> CompressedAttention:
    """Return a layer in which every parameter matters."""
    torch.manual_seed(seed)
    return _filled(CompressedAttention(config))


def parameters_of(layer: torch.nn.Module) -> dict[str, Tensor]:
    """Return the parameters as float64 leaves."""
    return {name: value.detach().double() for name, value in layer.named_parameters()}


def truth_of(
    config: MoEConfig, parameters: dict[str, Tensor], x: Tensor, positions: Tensor | None = None, **options: Any
) -> AttentionTruth:
    """Run the oracle on one sequence `[S, H]`."""
    assert config.attention is not None and config.indexer is not None
    sections = (dataclasses.asdict(config.attention), dataclasses.asdict(config.indexer))
    if config.attention.kind == "compressed":
        return compressed_attention_oracle(x.double(), parameters, *sections, **options)
    return attention_oracle(x.double(), parameters, *sections, positions=positions, **options)


def kept_of(indices: Tensor) -> list[list[int]]:
    """Return the kept keys of each query, ascending, of `[S, K]` with -1 behind."""
    return [sorted(i for i in row if i >= 0) for row in indices.tolist()]
