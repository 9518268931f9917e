"""Learned pooling of DeepSeek-V4: each 4 tokens become one entry, made of them and of the 4 before.

Shape letters: N tokens of this call, E entries that they complete, H hidden, D width of an entry, m tokens of an entry.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megamoe.kernels.rope import apply_rope, rope_tables
from megamoe.layers.token_layout import TokenLayout

__all__ = ["RATIO", "Completed", "Compressor", "turn_tail"]

RATIO = 4  # m: compress_ratio of the layers with an indexer


def turn_tail(x: Tensor, cos: Tensor, sin: Tensor, *, inverse: bool = False) -> Tensor:
    """Turn interleaved pairs of the last elements of `[N, ..., D]`; cos and sin `[N, turned / 2]` say how many."""
    plain, tail = x.split([x.shape[-1] - 2 * cos.shape[-1], 2 * cos.shape[-1]], dim=-1)
    return torch.cat([plain, apply_rope(tail, cos, sin, "interleaved", inverse=inverse)], dim=-1)


@dataclass(frozen=True)
class Completed:
    """The entries that the tokens of a call complete, sequence after sequence.

    Attributes:
        sequence, place: `[E]` int64: whose entry, and which of its entries.
        counts: entries of each sequence.
        sources: `[E, 2m]` int64: the rows of the m tokens before the entry's own, then of those, among B * 2m rows of
            earlier tokens (`CompressedCache.recent`) followed by the N of this call; -1 = none.
    """

    sequence: Tensor
    place: Tensor
    counts: list[int]
    sources: Tensor

    @staticmethod
    def of(layout: TokenLayout, ratio: int = RATIO) -> Completed:
        """Find them: an entry is complete with its last token."""
        device = layout.position.device
        done = [before // ratio for before in layout.before]
        counts = [
            (before + count) // ratio - have
            for before, count, have in zip(layout.before, layout.counts, done, strict=True)
        ]
        number = torch.tensor(counts, dtype=torch.int64, device=device)
        total = sum(counts)
        sequence = torch.arange(len(counts), device=device).repeat_interleave(number, output_size=total)
        first_entry = number.cumsum(0) - number
        place = (
            torch.arange(total, device=device)
            - first_entry[sequence]
            + torch.tensor(done, dtype=torch.int64, device=device)[sequence]
        )
        position = (place.unsqueeze(1) - 1) * ratio + torch.arange(2 * ratio, device=device)
        before = torch.tensor(layout.before, dtype=torch.int64, device=device)[sequence].unsqueeze(1)
        here = layout.first_tokens().long()[sequence].unsqueeze(1) + position - before
        earlier = sequence.unsqueeze(1) * 2 * ratio + position % (2 * ratio)
        sources = torch.where(position >= before, here + len(counts) * 2 * ratio, earlier)
        return Completed(sequence, place, counts, torch.where(position < 0, -1, sources))


class Compressor(nn.Module):
    """entry = RMS norm of a sum over 2m slots, weighted by a softmax over the slots, feature by feature.

    A token has two halves of features: the first goes into the entry after its own, the second into its own. Weights
    are softmax(gate + position_bias), in FP32. The last `rope_dim` elements are turned, at the position of the entry's
    first token.

    Parameters:
        kv_proj.weight, gate_proj.weight: `[2D, H]`.
        position_bias: `[m, 2D]` FP32.
        kv_norm.weight: `[D]` FP32.

    Args:
        hidden: H.
        width: D.
        eps: of the norm.
        dtype: of the projections.
        device: where parameters live.
    """

    def __init__(
        self, hidden: int, width: int, eps: float, *, dtype: torch.dtype, device: torch.device | str | None = None
    ) -> None:
        super().__init__()
        self.width = width
        self.kv_proj = nn.Linear(hidden, 2 * width, bias=False, dtype=dtype, device=device)
        self.gate_proj = nn.Linear(hidden, 2 * width, bias=False, dtype=dtype, device=device)
        self.position_bias = nn.Parameter(torch.zeros(RATIO, 2 * width, dtype=torch.float32, device=device))
        self.kv_norm = nn.RMSNorm(width, eps=eps, dtype=torch.float32, device=device)

    def project(self, x: Tensor) -> Tensor:
        """Return what a token gives to its entries, `[N, 4D]`: both halves, then the gates of both."""
        return torch.cat([self.kv_proj(x), self.gate_proj(x)], dim=-1)

    def entries(self, recent: Tensor | None, projected: Tensor, done: Completed, frequencies: Tensor) -> Tensor:
        """Make the entries, `[E, D]`.

        Args:
            recent: `[B * 2m, 4D]` of earlier tokens, or None when there are none.
            projected: `[N, 4D]`.
            done: which entries, and of which rows.
            frequencies: `[rope_dim / 2]` FP32.
        """
        sources, batch = done.sources, len(done.counts)
        if recent is None:
            sources, rows = (sources - batch * 2 * RATIO).clamp(min=-1), projected
        else:
            rows = torch.cat([recent.to(projected.dtype), projected])
        known = (sources >= 0).unsqueeze(-1)
        slots = rows.index_select(0, sources.clamp(min=0).flatten()).view(-1, 2, RATIO, 4, self.width).float()
        # the m tokens before give their first half, the entry's own give their second
        values = torch.cat([slots[:, 0, :, 0], slots[:, 1, :, 1]], dim=1)
        bias = self.position_bias.float().view(RATIO, 2, self.width)
        gates = torch.cat([slots[:, 0, :, 2] + bias[:, 0], slots[:, 1, :, 3] + bias[:, 1]], dim=1)
        weights = gates.masked_fill(~known, -torch.inf).softmax(dim=1)
        pooled = (values.masked_fill(~known, 0.0) * weights).sum(1)
        normed = F.rms_norm(pooled, (self.width,), self.kv_norm.weight.float(), self.kv_norm.eps).to(projected.dtype)
        return turn_tail(normed, *rope_tables(done.place * RATIO, frequencies))
