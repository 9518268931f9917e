"""What a call of the mega-kernel moves over NVLink, worked out from the routing: nothing here is measured.

Every choice of a token whose expert lives on another rank is one row there and one row back: the owner pulls the E4M3
row (hidden bytes), its scale and its list entry, and stores a BF16 row (2 * hidden bytes) and a tag into the source.
Tokens are not merged: two experts of one rank cost two rows each way, as in the kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["PULL_GBPS", "PUSH_GBPS", "Traffic", "link_us", "pull_parts", "rows_of_block", "traffic"]

# GB/s a direction between two H200s with both directions busy: bulk copies of 4 KB on every SM, and stores of 16 bytes
PULL_GBPS, PUSH_GBPS = 325.0, 360.0
_SIDE_IN, _SIDE_OUT = 8 + 4, 8  # ListEntry and scale read, tag stored (layout/control.h), bytes a row
_HEADER = 56  # CountHeader


@dataclass(frozen=True)
class Traffic:
    """Bytes and rows of one rank in one call; "in" arrives at this rank.

    Attributes:
        local_rows: choices of its own tokens that its own experts serve.
        rows: of its experts whose tokens live on other ranks.
        sent_rows: choices of its tokens that experts of other ranks serve.
        dispatch_in, dispatch_out: E4M3 rows.
        combine_in, combine_out: BF16 rows.
        side_in, side_out: list entries, scales, tags, counts and headers, as stored (a link moves 32 bytes at least).
    """

    local_rows: int
    rows: int
    sent_rows: int
    dispatch_in: int
    dispatch_out: int
    combine_in: int
    combine_out: int
    side_in: int
    side_out: int


def traffic(counts: list[list[int]], hidden: int) -> list[Traffic]:
    """Return the traffic of every rank.

    Args:
        counts: `[source rank][expert]` choices; experts are spread evenly over the ranks, in order.
        hidden: columns of x.
    """
    ranks = len(counts)
    local = len(counts[0]) // ranks
    rows = [[sum(source[owner * local : (owner + 1) * local]) for owner in range(ranks)] for source in counts]
    told = (ranks - 1) * (4 * local + _HEADER)  # by every rank to each of its peers
    found = []
    for rank in range(ranks):
        received = sum(rows[source][rank] for source in range(ranks) if source != rank)
        sent = sum(rows[rank]) - rows[rank][rank]
        found.append(
            Traffic(
                local_rows=rows[rank][rank],
                rows=received,
                sent_rows=sent,
                dispatch_in=received * hidden,
                dispatch_out=sent * hidden,
                combine_in=sent * 2 * hidden,
                combine_out=received * 2 * hidden,
                side_in=received * _SIDE_IN + sent * _SIDE_OUT + told,
                side_out=sent * _SIDE_IN + received * _SIDE_OUT + told,
            )
        )
    return found


def link_us(found: list[Traffic]) -> float:
    """Return the microseconds that the rows alone need on the busiest rank and direction, at the rates above."""
    times = [0.0]
    for rank in found:
        times.append(rank.dispatch_in / PULL_GBPS * 1e-3 + rank.combine_in / PUSH_GBPS * 1e-3)
        times.append(rank.dispatch_out / PULL_GBPS * 1e-3 + rank.combine_out / PUSH_GBPS * 1e-3)
    return max(times)


def pull_parts(
    counts: list[list[int]], rank: int, block_rows: int, pulls_per_block: int
) -> dict[tuple[int, int, int], tuple[int, int]]:
    """Return (rows of this rank, rows of others) of every pull task of a rank.

    A row block belongs to one expert, whose rows lie by source (scheduler/schedule.h, impls/mega_moe/pull.cuh).

    Args:
        counts: `[source rank][expert]` choices.
        rank: the puller.
        block_rows: rows of a row block.
        pulls_per_block: pull tasks of a row block.

    Returns:
        By (local expert, row block, index), as the events of a trace name them.
    """
    local = len(counts[0]) // len(counts)
    part = -(-block_rows // pulls_per_block)
    found = {}
    block = 0
    for expert in range(local):
        sources = [source[rank * local + expert] for source in counts]
        total, own_first = sum(sources), sum(sources[:rank])
        own_last = own_first + sources[rank]
        for first in range(0, total, block_rows):
            last = min(total, first + block_rows)
            for index in range(pulls_per_block):
                begin, end = min(last, first + index * part), min(last, first + (index + 1) * part)
                own = max(0, min(end, own_last) - max(begin, own_first))
                found[expert, block, index] = (own, end - begin - own)
            block += 1
    return found


def rows_of_block(parts: dict[tuple[int, int, int], tuple[int, int]]) -> dict[int, tuple[int, int]]:
    """Sum the parts of every row block."""
    found: dict[int, tuple[int, int]] = {}
    for (_, block, _), (own, others) in parts.items():
        before = found.get(block, (0, 0))
        found[block] = (before[0] + own, before[1] + others)
    return found
