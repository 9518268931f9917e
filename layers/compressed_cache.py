"""What DeepSeek-V4's attention keeps of earlier tokens: compressed entries in pages, and rings of the latest tokens.

Shape letters: B sequences, W row width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megamoe.errors import MegaMoeError
from megamoe.kernels.mqa_checks import whole_number
from megamoe.layers.paged_cache import PagedCache, check_sequences
from megamoe.layers.token_layout import TokenLayout

__all__ = ["DECODE_TOKENS", "CompressedCache"]

# Tokens of one sequence in a call whose rows go into the ring before they are attended to; more are a prefill.
DECODE_TOKENS = 8


class CompressedCache:
    """Entries, the rows of the sliding window, and the projections that entries not yet whole will be made of.

    Entries and window rows lie in one pool, "rows", so that one gather reaches both: sequence b of `pages` holds the
    entries of sequence b, sequence B + b its ring of `window + DECODE_TOKENS` rows, the row of a token at its position
    modulo that. Not rewindable: a ring has forgotten.

    Args:
        pools: as of `PagedCache`; "rows" must be among them.
        projections: name -> (width, dtype) of what a compressor needs of each token.
        ratio: tokens of an entry.
        window: tokens of the sliding window.
        sequences: B.
        page_size, pages, max_pages, device: as of `PagedCache`.

    Attributes:
        pages: the entries and the rings.
        recent: name -> `[B * 2 * ratio, W]`: projections of the latest tokens, each at its position modulo 2 * ratio.
        host_lengths: tokens of each sequence so far.
    """

    def __init__(
        self,
        pools: Mapping[str, tuple[int, torch.dtype]],
        projections: Mapping[str, tuple[int, torch.dtype]],
        *,
        ratio: int,
        window: int,
        sequences: int,
        page_size: int = 64,
        pages: int = 0,
        max_pages: int | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        if whole_number("sequences", sequences) < 1:
            raise ValueError(f"sequences: must be at least 1, got {sequences}")
        self.sequences, self.ratio, self.ring = sequences, ratio, window + DECODE_TOKENS
        self.pages = PagedCache(
            pools, sequences=2 * sequences, page_size=page_size, pages=pages, max_pages=max_pages, device=device
        )
        with torch.inference_mode(False):
            self.recent: dict[str, Tensor] = {
                name: torch.zeros(sequences * 2 * ratio, width, dtype=dtype, device=self.pages.device)
                for name, (width, dtype) in projections.items()
            }
        self.host_lengths = [0] * sequences
        self._torn: set[int] = set()

    @property
    def num_bytes(self) -> int:
        """Bytes of all pools and projections."""
        return self.pages.num_bytes + sum(t.numel() * t.element_size() for t in self.recent.values())

    def extend(self, counts: Sequence[int]) -> list[int]:
        """Count new tokens, make room for the entries that they complete, and return how many those are, by sequence.

        Raises:
            MegaMoeError: as `PagedCache.extend`, or a sequence that a call which ended early has left torn; nothing has
                changed.
        """
        torn = sorted(b for b in self._torn if counts[b])
        if torn:
            raise MegaMoeError(
                f"cache: a call ended early when it had changed sequences {torn}, whose earlier tokens cannot be "
                f"brought back; reset them"
            )
        lengths = [length + count for length, count in zip(self.host_lengths, counts, strict=True)]
        held = self.pages.host_lengths
        entries = [length // self.ratio - have for length, have in zip(lengths, held[: self.sequences], strict=True)]
        rings = [self.ring - have if count else 0 for have, count in zip(held[self.sequences :], counts, strict=True)]
        self.pages.extend([*entries, *rings])
        self.host_lengths = lengths
        return entries

    def take_back(self, lengths: Sequence[int], of_pages: Sequence[int]) -> None:
        """After a call that ended early: forget what it added, or remember which sequences' rings it may have changed.

        Args:
            lengths, of_pages: `host_lengths` and `pages.host_lengths` before it.
        """
        changed = [b for b, length in enumerate(lengths) if self.host_lengths[b] != length]
        if changed:
            self._torn.update(changed)
        else:
            self.pages.take_back(of_pages)

    def entry_slots(self, sequence: Tensor, place: Tensor) -> Tensor:
        """Return the row in the pools of an entry of each sequence."""
        return self.pages.slots(sequence, place)

    def ring_slots(self, sequence: Tensor, position: Tensor) -> Tensor:
        """Return the row in the pools where a token of each sequence stands while it is recent."""
        return self.pages.slots(sequence + self.sequences, position % self.ring)

    def remember(self, layout: TokenLayout, rows: Tensor, projections: Mapping[str, Tensor]) -> None:
        """Write the rows and the projections of the latest of some new tokens."""
        total = torch.tensor(self.host_lengths, dtype=torch.int64, device=rows.device)[layout.sequence]
        for name, values, size in (
            ("rows", rows, self.ring),
            *((n, p, 2 * self.ratio) for n, p in projections.items()),
        ):
            # an older token would be written to the same place
            latest = (layout.position >= total - size).nonzero().squeeze(1) if max(layout.counts) > size else None
            sequence, position = layout.sequence, layout.position
            if latest is not None:
                sequence, position, values = sequence[latest], position[latest], values[latest]
            if name == "rows":
                self.pages.write(name, self.ring_slots(sequence, position), values)
            else:
                place = sequence * 2 * self.ratio + position % (2 * self.ratio)
                self.recent[name].index_copy_(0, place, values.detach().to(self.recent[name].dtype))

    def reset(self, sequences: Sequence[int] | None = None) -> None:
        """Forget some sequences, or all; storage stays.

        Raises:
            ValueError: no such sequence; nothing has changed.
        """
        chosen = check_sequences(sequences, self.sequences)
        self.pages.reset([*chosen, *(self.sequences + b for b in chosen)])
        for b in chosen:
            self.host_lengths[b] = 0
        self._torn.difference_update(chosen)
