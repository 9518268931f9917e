"""The attention layer that a configuration describes."""

from __future__ import annotations

import torch

from megamoe.config import MoEConfig
from megamoe.layers.compressed_attention import CompressedAttention
from megamoe.layers.indexer_attention import IndexerAttention, attention_sections

__all__ = ["make_attention"]


def make_attention(
    config: MoEConfig, *, device: torch.device | str | None = None
) -> IndexerAttention | CompressedAttention:
    """Return the layer of `attention.kind`.

    Raises:
        ConfigError: the configuration has no attention.
    """
    attention, _ = attention_sections(config)
    kind = CompressedAttention if attention.kind == "compressed" else IndexerAttention
    return kind(config, device=device)
