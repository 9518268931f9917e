"""Small attention layers in FP32, and the float64 oracle of them over a padded batch."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from megamoe.config import MoEConfig
from megamoe.layers.indexer_attention import IndexerAttention
from megamoe.testing.attention_oracle import AttentionTruth, attention_oracle

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
TOP_K = 5
HIDDEN = 32
# FP32 against float64: some hundred roundings of values around 1
TOLERANCE = 1e-5


def config_of(name: str = "deepseek_v32", *, attention: Any = None, indexer: Any = None, **model: Any) -> MoEConfig:
    """Return a small configuration of a kind, with keys changed."""
    base, index = KINDS[name]
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


def layer_of(config: MoEConfig, seed: int = 0) -> IndexerAttention:
    """Return a layer in which every parameter matters: no norm weight is 1, no norm bias 0."""
    torch.manual_seed(seed)
    layer = IndexerAttention(config)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if "norm" in name:
                parameter.add_(0.3 * torch.randn(parameter.shape))
    return layer


def parameters_of(layer: torch.nn.Module) -> dict[str, Tensor]:
    """Return the parameters as float64 leaves."""
    return {name: value.detach().double() for name, value in layer.named_parameters()}


def truth_of(
    config: MoEConfig, parameters: dict[str, Tensor], x: Tensor, positions: Tensor | None = None, **options: Any
) -> AttentionTruth:
    """Run the oracle on one sequence `[S, H]`."""
    assert config.attention is not None and config.indexer is not None
    sections = (dataclasses.asdict(config.attention), dataclasses.asdict(config.indexer))
    return attention_oracle(x.double(), parameters, *sections, positions=positions, **options)


def kept_of(indices: Tensor) -> list[list[int]]:
    """Return the kept keys of each query, ascending, of `[S, K]` with -1 behind."""
    return [sorted(i for i in row if i >= 0) for row in indices.tolist()]
