"""Which tokens of a padded batch are real, and where each stands in its sequence.

Padding is taken out before anything is computed: no padded token reaches a cache, a key list or a softmax.

Shape letters: B sequences, S tokens of a sequence in this call, padding included, N real tokens of all sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megamoe import env
from megamoe.kernels.index_scores import Segment

__all__ = ["TokenLayout"]


@dataclass(frozen=True)
class TokenLayout:
    """The real tokens of one call, sequence after sequence.

    Attributes:
        shape: (B, S).
        keep: `[N]` int64, their places among the B * S, or None when all are real.
        sequence: `[N]` int64.
        position: `[N]` int64: the number of real tokens of the same sequence before it, earlier calls included.
        counts: real tokens of each sequence in this call.
        before: real tokens of each sequence in earlier calls.
    """

    shape: tuple[int, int]
    keep: Tensor | None
    sequence: Tensor
    position: Tensor
    counts: list[int]
    before: list[int]

    @staticmethod
    def of(
        shape: tuple[int, int], attention_mask: Tensor | None, before: list[int] | None, device: torch.device
    ) -> TokenLayout:
        """Lay a batch out.

        Args:
            shape: (B, S).
            attention_mask: `[B, S]`, or `[B, earlier + S]` of which the last S columns are read; 0 or False = padding.
            before: real tokens of each sequence in earlier calls; None where there are no earlier calls.
            device: of the batch.

        Raises:
            ValueError: the mask has another shape, or is elsewhere.
        """
        batch, length = shape
        alone = before is None
        before = [0] * batch if before is None else before
        start = (
            torch.tensor(before, dtype=torch.int64, device=device)
            if any(before)
            else torch.zeros(batch, dtype=torch.int64, device=device)
        )
        if attention_mask is None:
            sequence = torch.arange(batch, device=device).repeat_interleave(length)
            position = (start.unsqueeze(1) + torch.arange(length, device=device)).flatten()
            return TokenLayout(shape, None, sequence, position, [length] * batch, before)
        if not isinstance(attention_mask, Tensor) or attention_mask.device != device:
            got = attention_mask.device if isinstance(attention_mask, Tensor) else type(attention_mask).__name__
            raise ValueError(f"attention_mask: must be a tensor on {device}, got {got}")
        if attention_mask.dim() != 2 or attention_mask.shape[0] != batch or attention_mask.shape[1] < length:
            raise ValueError(
                f"attention_mask: must be [{batch}, {length}], or wider by the tokens of earlier calls, got "
                f"{list(attention_mask.shape)}"
            )
        if alone and attention_mask.shape[1] != length:
            raise ValueError(
                f"attention_mask: must be [{batch}, {length}] without a cache, because there are no earlier tokens, "
                f"got {list(attention_mask.shape)}"
            )
        real = attention_mask[:, attention_mask.shape[1] - length :] != 0
        position = start.unsqueeze(1) + real.cumsum(1) - 1
        keep = real.flatten().nonzero().squeeze(1)
        counts: list[int] = real.sum(1).tolist()
        return TokenLayout(shape, keep, keep // length, position.flatten()[keep], counts, before)

    def pack(self, padded: Tensor) -> Tensor:
        """Take the real tokens: `[B, S, ...]` to `[N, ...]`."""
        flat = padded.flatten(0, 1)
        return flat if self.keep is None else flat.index_select(0, self.keep)

    def pack_choice(self, topk_indices: Tensor, limits: Tensor) -> Tensor:
        """Take the kept places of the real tokens: `[B, S, K]` to `[N, K]`.

        Args:
            topk_indices: int32 or int64; below 0 = none.
            limits: `[N]`: how many places each token may keep from. A place beyond is nobody's or another's: it is an
                error on a CPU and in checked mode (MEGAMOE_CHECK=1), elsewhere it is not looked for.

        Raises:
            ValueError: a shape or dtype outside the above, or a place beyond.
        """
        wanted = f"int32 or int64 [{self.shape[0]}, {self.shape[1]}, K]"
        if not isinstance(topk_indices, Tensor):
            raise ValueError(f"topk_indices: must be {wanted}, got {type(topk_indices).__name__}")
        fits = topk_indices.dim() == 3 and tuple(topk_indices.shape[:2]) == self.shape
        if not fits or topk_indices.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"topk_indices: must be {wanted}, got {topk_indices.dtype} {list(topk_indices.shape)}")
        index = self.pack(topk_indices)
        if not index.is_cuda or env.flag("MEGAMOE_CHECK"):
            beyond = (index >= limits.unsqueeze(1)).nonzero()
            if len(beyond):
                row, column = beyond[0].tolist()
                raise ValueError(
                    f"topk_indices: token {int(self.position[row])} of sequence {int(self.sequence[row])} may keep "
                    f"places below {int(limits[row])}, got {int(index[row, column])}"
                )
        return index

    def unpack(self, rows: Tensor, fill: float = 0.0) -> Tensor:
        """Put them back: `[N, ...]` to `[B, S, ...]`, with `fill` at the padded places."""
        if self.keep is not None:
            full = rows.new_full((self.shape[0] * self.shape[1], *rows.shape[1:]), fill)
            rows = full.index_copy(0, self.keep, rows)
        return rows.view(*self.shape, *rows.shape[1:])

    def segments(self) -> list[Segment]:
        """Return which tokens meet which keys, the keys of all sequences standing one after the other."""
        result, token, key = [], 0, 0
        for count, before in zip(self.counts, self.before, strict=True):
            if count:
                result.append((token, token + count, key, key + before + count))
            token, key = token + count, key + before + count
        return result

    def first_tokens(self) -> Tensor:
        """Return `[B]` int32: where the tokens of each sequence begin among the N."""
        starts = [sum(self.counts[:b]) for b in range(len(self.counts))]
        return torch.tensor(starts, dtype=torch.int32, device=self.position.device)
