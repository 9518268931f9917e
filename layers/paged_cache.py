"""A small paged cache: rows of several pools, in pages that sequences take as they grow.

Shape letters: B sequences, P pages of a sequence, W width of a row.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megamoe.errors import MegaMoeError
from megamoe.kernels.mqa_checks import whole_number

__all__ = ["PagedCache", "check_sequences"]


def check_sequences(sequences: Sequence[int] | None, count: int) -> list[int]:
    """Return the numbers of some sequences, of all for None, refusing those that are not among `count`."""
    if sequences is None:
        return list(range(count))
    rule = f"sequences: must be numbers in 0..{count - 1}"
    try:
        chosen = [operator.index(sequence) for sequence in sequences]
    except TypeError:
        raise ValueError(f"{rule}, got {sequences!r}") from None
    for sequence in chosen:
        if not 0 <= sequence < count:
            raise ValueError(f"{rule}, got {sequence}")
    return chosen


class PagedCache:
    """Rows per token of each sequence, in pages; all pools share one table of pages.

    Storage grows on demand: it doubles (and moves) when pages run out, up to `max_pages`. Lengths are known to the
    host, so a decoding step neither copies nor waits. Not part of any module's state, and nothing here has a gradient.

    Args:
        pools: name -> (row width, dtype).
        sequences: B, fixed.
        page_size: rows of a page.
        pages: pages to begin with.
        max_pages: bound of the growth, or None.
        device: where the rows live; None = torch's default device.

    Attributes:
        pools: name -> `[pages, page_size, W]`; a page that was never written holds zeros.
        block_table: `[B, P]` int32: the pages of each sequence, in order; 0 behind its last.
        lengths: `[B]` int32 on the device: rows of each sequence.
        host_lengths: the same, as a list.

    Raises:
        ValueError: a size below 1.
    """

    def __init__(
        self,
        pools: Mapping[str, tuple[int, torch.dtype]],
        *,
        sequences: int,
        page_size: int = 64,
        pages: int = 0,
        max_pages: int | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        for name, value, low in (("sequences", sequences, 1), ("page_size", page_size, 1), ("pages", pages, 0)):
            if whole_number(name, value) < low:
                raise ValueError(f"{name}: must be at least {low}, got {value}")
        if max_pages is not None and whole_number("max_pages", max_pages) < pages:
            raise ValueError(f"max_pages: must be at least pages={pages}, got {max_pages}")
        self.device = torch.get_default_device() if device is None else torch.device(device)
        self.sequences, self.page_size, self.max_pages = sequences, page_size, max_pages
        self._free = list(range(pages - 1, -1, -1))
        self._pages: list[list[int]] = [[] for _ in range(sequences)]
        self.host_lengths = [0] * sequences
        with torch.inference_mode(False):  # a cache outlives the mode that it was made in
            self.pools: dict[str, Tensor] = {
                name: torch.zeros(pages, page_size, width, dtype=dtype, device=self.device)
                for name, (width, dtype) in pools.items()
            }
            self.lengths = torch.zeros(sequences, dtype=torch.int32, device=self.device)
            self.block_table = torch.zeros(sequences, 0, dtype=torch.int32, device=self.device)

    @property
    def num_pages(self) -> int:
        """Pages in storage, taken or free."""
        return next(iter(self.pools.values())).shape[0]

    @property
    def num_bytes(self) -> int:
        """Bytes of all pools."""
        return sum(pool.numel() * pool.element_size() for pool in self.pools.values())

    def extend(self, counts: Sequence[int]) -> None:
        """Give each sequence room for `counts[b]` more rows, and count them as there; the caller writes them.

        Raises:
            ValueError: not one count per sequence, or a negative one.
            MegaMoeError: more pages than `max_pages` are needed; nothing has changed.
        """
        fits = isinstance(counts, (list, tuple)) and len(counts) == self.sequences
        if not fits or min(whole_number("counts", count) for count in counts) < 0:
            raise ValueError(f"counts: must be {self.sequences} numbers of at least 0, got {counts}")
        wanted = [
            self._pages_for(length + count) - len(pages)
            for length, count, pages in zip(self.host_lengths, counts, self._pages, strict=True)
        ]
        missing = sum(max(0, want) for want in wanted) - len(self._free)
        if missing > 0:
            self._grow(missing)
        for pages, want in zip(self._pages, wanted, strict=True):
            pages.extend(self._free.pop() for _ in range(want))
        if any(want > 0 for want in wanted):
            self._upload_table()
        self.host_lengths = [length + count for length, count in zip(self.host_lengths, counts, strict=True)]
        if len(set(counts)) == 1:
            self.lengths += counts[0]
        else:
            self.lengths += torch.tensor(counts, dtype=torch.int32, device=self.device)

    def slots(self, sequence: Tensor, position: Tensor) -> Tensor:
        """Return the row in a flattened pool of each (sequence, place in it): int64, the shape of both."""
        page = self.block_table[sequence, position // self.page_size].long()
        return page * self.page_size + position % self.page_size

    def rows(self, name: str) -> Tensor:
        """Return a pool as `[pages * page_size, W]`."""
        return self.pools[name].flatten(0, 1)

    def write(self, name: str, slots: Tensor, rows: Tensor) -> None:
        """Write rows `[N, W]` to `slots` `[N]`."""
        self.rows(name).index_copy_(0, slots, rows.detach().to(self.pools[name].dtype))

    def check_pools(self, pools: Mapping[str, tuple[int, torch.dtype]], device: torch.device) -> None:
        """Refuse to serve a layer that keeps other rows.

        Raises:
            ValueError: a pool that is not there, or has another width, dtype or device.
        """
        for name, (width, dtype) in pools.items():
            pool = self.pools.get(name)
            if pool is None or pool.shape[2] != width or pool.dtype != dtype or pool.device != device:
                has = "none" if pool is None else f"rows of {pool.shape[2]} {pool.dtype} on {pool.device}"
                raise ValueError(
                    f"cache: this layer needs a pool {name!r} with rows of {width} {dtype} on {device}, and the cache "
                    f"has {has}; make it with make_cache of this layer, after moves and casts"
                )

    def truncate(self, sequence: int, length: int) -> None:
        """Forget the rows of a sequence from `length` on, and free their pages.

        Raises:
            ValueError: no such sequence, or `length` is negative, or more than there is.
        """
        check_sequences([sequence], self.sequences)
        if not 0 <= whole_number("length", length) <= self.host_lengths[sequence]:
            raise ValueError(f"length: must be in 0..{self.host_lengths[sequence]}, got {length}")
        pages = self._pages[sequence]
        keep = self._pages_for(length)
        self._free.extend(reversed(pages[keep:]))
        del pages[keep:]
        self.host_lengths[sequence] = length
        self.lengths[sequence] = length
        self._upload_table()

    def reset(self, sequences: Sequence[int] | None = None) -> None:
        """Forget some sequences, or all; storage stays.

        Raises:
            ValueError: no such sequence; nothing has changed.
        """
        for sequence in check_sequences(sequences, self.sequences):
            self.truncate(sequence, 0)

    def take_back(self, lengths: Sequence[int]) -> None:
        """Forget all rows since the sequences had `lengths`: after a call that ended early, wherever it did."""
        for pages, length in zip(self._pages, lengths, strict=True):
            del pages[self._pages_for(length) :]
        taken = {page for pages in self._pages for page in pages}
        # worked out anew: a page can have been on its way, or the storage have grown and no page be free yet
        self._free = [page for page in range(self.num_pages - 1, -1, -1) if page not in taken]
        self.host_lengths = list(lengths)
        self.lengths.copy_(torch.tensor(self.host_lengths, dtype=torch.int32))
        self._upload_table()

    def _pages_for(self, length: int) -> int:
        return -(-length // self.page_size)

    def _upload_table(self) -> None:
        columns = max((len(pages) for pages in self._pages), default=0)
        table = torch.zeros(self.sequences, columns, dtype=torch.int32)
        for row, pages in zip(table, self._pages, strict=True):
            row[: len(pages)] = torch.tensor(pages, dtype=torch.int32)
        self.block_table = table.to(self.device, non_blocking=True)

    def _grow(self, missing: int) -> None:
        have = self.num_pages
        pages = max(have + missing, 2 * have)
        if self.max_pages is not None:
            pages = min(pages, self.max_pages)
            if pages < have + missing:
                raise MegaMoeError(
                    f"the cache may hold {self.max_pages} pages of {self.page_size} rows and {have + missing} are "
                    f"needed; give it more max_pages, or reset sequences that have ended"
                )
        with torch.inference_mode(False):
            grown = {name: pool.new_zeros(pages, *pool.shape[1:]) for name, pool in self.pools.items()}
            for name, pool in self.pools.items():
                grown[name][:have] = pool
        self.pools.update(grown)  # all or none
        self._free[:0] = range(pages - 1, have - 1, -1)
