"""Every state of the protocol for small jobs; and proof that the search sees what it is there to see."""

from __future__ import annotations

from dataclasses import fields
from itertools import product

import pytest
from protocol_model import Bugs, Found, explore

TWO_RANKS = [list(tokens) for tokens in product(product((0, 1), repeat=2), repeat=3)]
THREE_RANKS = [
    [(1, 0, 0), (0, 1, 0), (0, 0, 1)],
    [(0, 1, 0), (1, 0, 0), (0, 0, 0)],
    [(0, 0, 0), (0, 0, 0), (0, 1, 0)],
]
SEEDED = [field.name for field in fields(Bugs)]


@pytest.mark.parametrize("ring", [1, 2])
def test_two_ranks_three_calls(ring: int) -> None:
    results = [explore(tokens, ring=ring) for tokens in TWO_RANKS]
    print(f"{sum(result.states for result in results)} states in {len(results)} jobs")
    assert all(result.complete == 1 and result.aborted == 0 for result in results)


def test_two_ranks_with_aborts() -> None:
    results = [explore(tokens, with_abort=True) for tokens in TWO_RANKS[::5]]
    print(f"{sum(result.states for result in results)} states in {len(results)} jobs")
    assert all(result.complete == 1 and result.aborted > 0 for result in results)


@pytest.mark.parametrize("with_abort", [False, True], ids=["", "aborts"])
@pytest.mark.parametrize("tokens", THREE_RANKS, ids=str)
def test_three_ranks_three_calls(tokens: list[tuple[int, ...]], with_abort: bool) -> None:
    result = explore(tokens, with_abort=with_abort)
    print(f"{result.states} states, {result.aborted} of them end in an abort")
    assert result.complete == 1 and (result.aborted > 0) == with_abort


@pytest.mark.parametrize("name", SEEDED)
def test_seeded_bugs_are_found(name: str) -> None:
    found = []
    for tokens in TWO_RANKS:
        try:
            explore(tokens, bugs=Bugs(**{name: True}))
        except Found as error:
            found.append(str(error))
    print(f"{name}: found in {len(found)} of {len(TWO_RANKS)} jobs; {found[0] if found else ''}")
    assert found
