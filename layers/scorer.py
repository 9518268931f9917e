"""What the indexers share: their number format, and the choice of the keys that score best.

Shape letters: B sequences, n queries of each, N queries of all, I heads, D head width, T keys, K kept keys.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megamoe.config import IndexerConfig
from megamoe.kernels.index_rows import IndexRows, encode_rows
from megamoe.kernels.index_scores import MAX_PAGED_QUERIES, Segment, select_keys, select_paged_keys
from megamoe.layers.paged_cache import PagedCache

__all__ = ["Scorer"]


class Scorer:
    """Mixed into an indexer module, which makes queries, keys and weights.

    Attributes:
        config: section `indexer`.
    """

    config: IndexerConfig

    def encode(self, x: Tensor) -> IndexRows:
        """Bring queries or keys `[..., D]` to the indexer's format."""
        return encode_rows(x, self.config.quantization, hadamard=self.config.hadamard)

    @torch.no_grad()
    def select(
        self,
        q: Tensor,
        k: IndexRows,
        weights: Tensor,
        starts: Tensor,
        ends: Tensor,
        segments: Sequence[Segment] | None = None,
    ) -> Tensor:
        """Return the keys that each query keeps.

        Args:
            q: `[N, I, D]`; k: `[T, D]`, encoded; weights: `[N, I]` FP32.
            starts, ends: `[N]` int32: the window of each query, as rows of k.
            segments: which queries meet which keys; None = all meet all.

        Returns:
            `[N, top_k]` int32, counted from the start of each window, -1 where the window has fewer. No gradient.
        """
        config = self.config
        budget = config.max_logits_mib << 20
        return select_keys(
            self.encode(q), k, weights, starts, ends, config.top_k, segments=segments, max_logits_bytes=budget
        )

    @torch.no_grad()
    def select_paged(self, q: Tensor, pool: Tensor, weights: Tensor, lengths: Tensor, cache: PagedCache) -> Tensor:
        """Return the keys that the last queries of every sequence keep of the cache, as places in their sequence.

        Args:
            q: `[B, n, I, D]`, n at most `MAX_PAGED_QUERIES`; pool: of the cache, in the indexer's quantised format.
            weights: `[B * n, I]` FP32.
            lengths: `[B, n]` int32: keys that each query sees.
            cache: whose pages they are.

        Returns:
            `[B * n, top_k]` int32, -1 where there are fewer. No gradient.
        """
        return select_paged_keys(
            self.encode(q),
            pool,
            weights,
            lengths,
            cache.block_table[: lengths.shape[0]],
            self.config.top_k,
            max_length=max(cache.host_lengths[: lengths.shape[0]], default=0),
            max_logits_bytes=self.config.max_logits_mib << 20,
        )

    def can_page(self, counts: Sequence[int]) -> bool:
        """Tell whether `select_paged` takes a call with so many queries of each sequence."""
        return self.config.quantization != "none" and len(set(counts)) == 1 and 1 <= counts[0] <= MAX_PAGED_QUERIES
