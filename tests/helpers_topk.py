"""What a top-k must choose, by sorting a row's columns in Python, and rows that selections are known to get wrong."""

from __future__ import annotations

import math

import torch


def expected_columns(
    x: torch.Tensor, k: int, starts: torch.Tensor | None = None, ends: torch.Tensor | None = None
) -> list[list[int]]:
    """Return the columns of each row, ascending, then -1."""
    rows, columns = x.shape
    first = [0] * rows if starts is None else starts.tolist()
    last = [columns] * rows if ends is None else ends.tolist()
    found = []
    for row, begin, end in zip(x.float().tolist(), first, last, strict=True):
        window = [c for c in range(max(begin, 0), min(end, columns)) if row[c] != -math.inf]
        window.sort(key=lambda c: (not math.isnan(row[c]), 0.0 if math.isnan(row[c]) else -row[c], c))
        chosen = sorted(window[:k])
        found.append(chosen + [-1] * (k - len(chosen)))
    return found


def strange_rows(columns: int) -> torch.Tensor:
    """Return FP32 rows: ordinary, constant, of few values, sorted, tiny, masked, with NaN and infinities."""
    generator = torch.Generator().manual_seed(7)
    noise = torch.randn(columns, generator=generator)
    index = torch.arange(columns, dtype=torch.float32)
    zeros = torch.where(noise > 0, 0.0, -0.0)
    few = torch.full((columns,), -torch.inf)
    few[:: max(1, columns // 100)] = noise[:: max(1, columns // 100)]
    late = noise.clone()
    late[: columns - columns // 8] -= 100.0
    periodic = torch.where(index % 64 < 4, noise + 10.0, noise)
    with_nan = noise.clone()
    with_nan[5::7] = float("nan")
    with_nan[3::11] = -float("nan")
    with_infinities = noise.clone()
    with_infinities[4::5] = float("inf")
    with_infinities[1::3] = float("-inf")
    one = torch.zeros(columns)
    one[columns // 2] = 1.0
    rows = [
        noise, noise.relu(), torch.full((columns,), 1.5), zeros, torch.full((columns,), -torch.inf),
        torch.full((columns,), float("nan")), torch.where(noise > 0, 1.0, 2.0), torch.where(noise > 1.8, 3.0, -2.0),
        index, -index, index * 2.0**-149, noise * 2.0**-140, noise * 2.0**120, few, late, periodic, with_nan,
        with_infinities, one, (noise * 8).round(), 1.0 + noise * 2.0**-22, -noise.abs(), torch.full((columns,), -3e38),
        noise.sort(descending=True).values, noise**9,
    ]  # fmt: skip
    return torch.stack(rows)
