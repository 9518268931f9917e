"""The text that the jobs run on: bytes, their entropy, and each rank's slice."""

from __future__ import annotations

import math
from collections import Counter
from importlib.resources import files
from pathlib import Path

from megamoe.errors import MegaMoeError

__all__ = ["load_text", "slice_bounds", "unigram_entropy"]


def load_text(path: str | Path | None = None) -> bytes:
    """Return the bytes of a text file, or of the shipped text for None.

    Raises:
        MegaMoeError: the file is missing, unreadable or empty.
    """
    if path is None:
        return files("megamoe.launch").joinpath("sample.txt").read_bytes()
    try:
        text = Path(path).read_bytes()
    except OSError as error:
        raise MegaMoeError(f"--text {path}: {error.strerror or error}") from error
    if not text:
        raise MegaMoeError(f"--text {path}: the file is empty")
    return text


def unigram_entropy(text: bytes) -> float:
    """Return the entropy of the single bytes in nats per byte: what a model without any context can reach at best."""
    total = len(text)
    return -sum(count / total * math.log(count / total) for count in Counter(text).values())


def slice_bounds(text: bytes, num_slices: int, max_bytes: int) -> list[tuple[int, int]]:
    """Cut the start of a text into one slice per rank, each of at most `max_bytes`.

    A cut is moved back behind a white space, so that the slices differ in size as real batches do. A text shorter than
    all slices is shared out evenly; there may be empty slices.

    Returns:
        (first, end) of each slice; slices are adjacent.
    """
    bounds, first = [], 0
    for index in range(num_slices):
        remaining = len(text) - first
        end = first + min(max_bytes, -(-remaining // (num_slices - index)))
        if end < len(text):
            cut = max(text.rfind(b" ", first, end), text.rfind(b"\n", first, end))
            end = cut + 1 if cut >= 0 else end
        bounds.append((first, end))
        first = end
    return bounds
