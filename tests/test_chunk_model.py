"""Every state of small calls of several chunks: each task once, counts and x of the right chunk, and always an end."""

from __future__ import annotations

import pytest
from chunk_model import Found, Job, explore

Tokens = tuple[tuple[int | None, ...], ...]


@pytest.mark.parametrize(
    ("tokens", "ctas"),
    [
        (((0,),), (1,)),
        (((0, 0, 0),), (1,)),
        (((0, 0, 0),), (2,)),
        (((None, 0),), (3,)),  # a CTA that comes late finds the first chunk over
        (((1, 0), (0,)), (1, 1)),
        (((1, 0), (0,)), (2, 1)),
        (((1, None, 1), (0,)), (2, 1)),  # the second rank has one chunk and serves three
        (((1, 0, 1), (0,)), (1, 2)),
        (((None, 1), (1, 0, None)), (2, 1)),
        pytest.param(((0, 0, 0),), (3,), marks=pytest.mark.slow),
        pytest.param(((1, 1), (None,)), (2, 2), marks=pytest.mark.slow),
    ],
)
def test_every_call_ends(tokens: Tokens, ctas: tuple[int, ...]) -> None:
    print(f"{explore(Job(tokens, ctas))} states")


@pytest.mark.parametrize(
    ("bug", "tokens", "ctas", "words"),
    [
        ("look", ((1, 1, 1), (None,)), (1, 2), "builds a schedule of chunk 0 from counts of another"),
        ("void", ((None, 0),), (2,), "combine 0 of chunk 1 is done twice"),
        ("ended", ((1, 1), (None,)), (2, 1), "reads x of rank 0 for chunk 0, it is of 1"),
        ("ended", ((0, 0),), (2,), "did .* not"),  # the CTA that had the combine goes on without it
    ],
)
def test_what_is_left_out_is_found(bug: str, tokens: Tokens, ctas: tuple[int, ...], words: str) -> None:
    with pytest.raises(Found, match=words):
        explore(Job(tokens, ctas, bug))
