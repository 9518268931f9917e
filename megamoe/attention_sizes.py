"""What one attention layer and its cache hold, counted from the configuration: no torch, nothing is allocated."""

from __future__ import annotations

from dataclasses import dataclass

from megamoe.config_sections import AttentionConfig, IndexerConfig

__all__ = ["AttentionSizes", "attention_sizes"]

_TOKENS_OF_AN_ENTRY = 4
_SCALE_BYTES = 4  # of an index key in a quantised format


@dataclass(frozen=True)
class AttentionSizes:
    """Sizes of one layer.

    Attributes:
        parameters: numbers of the attention, the indexer's not counted.
        indexer_parameters: numbers of the indexer.
        token_bytes: of the cache per token, the indexer's key included; a sliding window is beside it.
    """

    parameters: int
    indexer_parameters: int
    token_bytes: int


def attention_sizes(
    attention: AttentionConfig, indexer: IndexerConfig, hidden: int, element_bytes: int
) -> AttentionSizes:
    """Count one layer; `element_bytes` are those of the model's dtype."""
    queries = attention.q_lora * (hidden + 1 + attention.heads * attention.query_dim)
    index_queries = indexer.heads * (indexer.head_dim * attention.q_lora + hidden)
    key_bytes = {
        "none": indexer.head_dim * element_bytes,
        "fp8": indexer.head_dim + _SCALE_BYTES,
        "mxfp4": indexer.head_dim // 2 + _SCALE_BYTES,
    }[indexer.quantization]
    if attention.kind == "compressed":
        width, groups, lora = attention.head_dim or 0, attention.output_groups or 0, attention.output_lora or 0
        own_rows = hidden * width + width + attention.heads  # a projection, its norm, the sinks
        output = attention.heads * width * lora + groups * lora * hidden
        return AttentionSizes(
            queries + own_rows + output + _compressor(width, hidden),
            index_queries + _compressor(indexer.head_dim, hidden),
            (width * element_bytes + key_bytes) // _TOKENS_OF_AN_ENTRY,
        )
    index_keys = indexer.head_dim * (hidden + 2)
    if attention.kind == "mla":
        latent, nope, value = attention.kv_lora or 0, attention.nope_dim or 0, attention.value_dim or 0
        row = latent + attention.rope_dim
        rows = hidden * row + latent + latent * attention.heads * (nope + value)
    else:
        value = attention.head_dim or 0
        row = 2 * (attention.kv_heads or 0) * value
        rows = hidden * row
    output = attention.heads * value * hidden
    return AttentionSizes(queries + rows + output, index_queries + index_keys, row * element_bytes + key_bytes)


def _compressor(width: int, hidden: int) -> int:
    """Count two projections to two halves of features, a bias per token of an entry, and a norm."""
    return 2 * 2 * width * hidden + _TOKENS_OF_AN_ENTRY * 2 * width + width
