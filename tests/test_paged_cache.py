"""The paged cache: what is written is read, growth, bounds, truncation, and what one sequence does to another."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from megamoe.errors import MegaMoeError
from megamoe.layers.paged_cache import PagedCache

POOLS = {"a": (3, torch.float32), "b": (2, torch.uint8)}


def append(cache: PagedCache, counts: list[int], held: list[list[float]], value: float) -> float:
    """Write one number per new row of every sequence, and remember it."""
    before = cache.host_lengths
    cache.extend(counts)
    for b, count in enumerate(counts):
        if count:
            slots = cache.slots(torch.full((count,), b), torch.arange(before[b], before[b] + count))
            rows = torch.arange(count, dtype=torch.float32).add(value).unsqueeze(1)
            cache.write("a", slots, rows.expand(-1, 3))
            cache.write("b", slots, (rows % 251).expand(-1, 2))
            held[b].extend(rows.flatten().tolist())
            value += count
    return value


def check(cache: PagedCache, held: list[list[float]]) -> None:
    assert cache.host_lengths == cache.lengths.tolist() == [len(rows) for rows in held]
    pages = [page for b, rows in enumerate(held) for page in cache.block_table[b, : -(-len(rows) // cache.page_size)]]
    assert len(set(map(int, pages))) == len(pages), "a page belongs to one sequence"
    for b, rows in enumerate(held):
        slots = cache.slots(torch.full((len(rows),), b), torch.arange(len(rows)))
        assert cache.rows("a")[slots].tolist() == [[value] * 3 for value in rows]
        assert cache.rows("b")[slots, 0].tolist() == [int(value % 251) for value in rows]


@pytest.mark.parametrize("page_size", [1, 4, 7])
def test_random_histories(page_size: int) -> None:
    draw = random.Random(page_size)
    cache = PagedCache(POOLS, sequences=4, page_size=page_size)
    held: list[list[float]] = [[] for _ in range(4)]
    value = 1.0
    for _ in range(60):
        action = draw.random()
        if action < 0.75:
            value = append(cache, [draw.choice([0, 1, 1, 2, 9]) for _ in range(4)], held, value)
        elif action < 0.95:
            b = draw.randrange(4)
            length = draw.randint(0, len(held[b]))
            cache.truncate(b, length)
            del held[b][length:]
        else:
            cache.reset([1, 2])
            held[1].clear()
            held[2].clear()
        check(cache, held)
    pages = cache.num_pages
    cache.reset()
    assert cache.host_lengths == [0] * 4 and cache.num_pages == pages
    assert cache.num_bytes == pages * page_size * (3 * 4 + 2)
    cache.extend([page_size * pages // 4] * 4)
    assert cache.num_pages == pages, "pages that were freed are used again"


def test_a_bound_is_kept_and_nothing_changes_when_it_is_met() -> None:
    cache = PagedCache(POOLS, sequences=2, page_size=4, pages=1, max_pages=3)
    held: list[list[float]] = [[], []]
    value = append(cache, [5, 2], held, 1.0)
    assert cache.num_pages == 3
    with pytest.raises(MegaMoeError, match="may hold 3 pages of 4 rows and 4 are needed"):
        cache.extend([0, 3])
    check(cache, held)
    append(cache, [3, 2], held, value)
    check(cache, held)


def test_no_page_is_lost_where_a_call_ended_while_the_cache_grew() -> None:
    class Stopped(dict[str, torch.Tensor]):
        def update(self, *args: Any, **kwargs: Any) -> None:
            super().update(*args, **kwargs)
            raise KeyboardInterrupt

    cache = PagedCache(POOLS, sequences=2, page_size=4, pages=1, max_pages=3)
    held: list[list[float]] = [[], []]
    value = append(cache, [3, 0], held, 1.0)
    cache.pools = Stopped(cache.pools)
    with pytest.raises(KeyboardInterrupt):
        cache.extend([5, 4])
    assert cache.num_pages == 3, "the storage has grown"
    cache.pools = dict(cache.pools)
    cache.take_back([3, 0])
    check(cache, held)
    append(cache, [5, 4], held, value)
    check(cache, held)


def test_refusals() -> None:
    cache = PagedCache(POOLS, sequences=2)
    for counts in ([1], [1, -1]):
        with pytest.raises(ValueError, match="counts: must be 2 numbers of at least 0"):
            cache.extend(counts)
    with pytest.raises(ValueError, match=r"length: must be in 0\.\.0, got 1"):
        cache.truncate(0, 1)
    cache.extend([3, 2])
    for wrong in (2, -1):
        with pytest.raises(ValueError, match=rf"sequences: must be numbers in 0\.\.1, got {wrong}"):
            cache.truncate(wrong, 0)
        with pytest.raises(ValueError, match="sequences: must be numbers"):
            cache.reset([0, wrong])
    with pytest.raises(ValueError, match="sequences: must be numbers"):
        cache.reset(1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="length: must be a whole number, got None"):
        cache.truncate(0, None)  # type: ignore[arg-type]
    for counts, match in ((7, "counts: must be 2 numbers"), ([1, "2"], "counts: must be a whole number, got '2'")):
        with pytest.raises(ValueError, match=match):
            cache.extend(counts)  # type: ignore[arg-type]
    assert cache.host_lengths == [3, 2], "a refused call changes nothing"
    with pytest.raises(ValueError, match="page_size: must be a whole number, got 1.5"):
        PagedCache(POOLS, sequences=1, page_size=1.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="sequences: must be at least 1"):
        PagedCache(POOLS, sequences=0)
    with pytest.raises(ValueError, match="max_pages: must be at least pages=4"):
        PagedCache(POOLS, sequences=1, pages=4, max_pages=3)
