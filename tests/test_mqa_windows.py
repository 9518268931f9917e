"""The windows that the MQA logits kernels compute, on a CPU: starts, ends and lengths may be any int32."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from itertools import product

import pytest

pytest.importorskip("torch")

from helpers_emulated import NO_COMPILER, compile_emulated  # noqa: E402

from megamoe.kernels.mqa_checks import MAX_COUNT  # noqa: E402

pytestmark = NO_COMPILER
LOW, HIGH = -(2**31), 2**31 - 1
NUMBERS = (LOW, LOW + 1, LOW + 3, -5, -1, 0, 1, 2, 3, 7, 20, 21, MAX_COUNT, HIGH - 3, HIGH - 1, HIGH)
Windows = Callable[..., list[tuple[int, int]]]


@pytest.fixture(scope="module")
def find_windows(tmp_path_factory: pytest.TempPathFactory) -> Windows:
    """Return a function of (starts, ends, batches, next_n, num_keys, num_columns, compressed, of_rows)."""
    run = compile_emulated(tmp_path_factory.mktemp("windows"), "mqa_windows.cpp").find_windows

    def call(starts: list[int], ends: list[int], batches: int, next_n: int, *numbers: int) -> list[tuple[int, int]]:
        rows = batches * max(next_n, 1)
        out = (ctypes.c_int * (2 * rows))()
        arrays = [(ctypes.c_int * len(values))(*values) for values in (starts, ends)]
        run(*arrays, batches, next_n, *numbers, out)
        return [(out[2 * i], out[2 * i + 1]) for i in range(rows)]

    return call


@pytest.mark.parametrize("num_keys", [1, 20, MAX_COUNT])
def test_neighbouring_keys(find_windows: Windows, num_keys: int) -> None:
    starts, ends = map(list, zip(*product(NUMBERS, NUMBERS), strict=True))
    for compressed, columns in ((0, num_keys), (1, 3), (1, MAX_COUNT)):
        found = find_windows(starts, ends, len(starts), 0, num_keys, columns, compressed, 0)
        for start, end, window in zip(starts, ends, found, strict=True):
            first = min(max(start, 0), num_keys)
            length = max(min(end, num_keys) - first, 0)
            assert window == (first, min(length, columns)), (start, end)


@pytest.mark.parametrize("next_n", [1, 2, 3, 4])
@pytest.mark.parametrize("columns", [2, 20, MAX_COUNT])
def test_paged_keys(find_windows: Windows, next_n: int, columns: int) -> None:
    num_keys = 1000
    found = find_windows([], list(NUMBERS), len(NUMBERS), next_n, num_keys, columns, 0, 0)
    of_rows = [number for number in NUMBERS for _ in range(next_n)]
    each = find_windows([], of_rows, len(NUMBERS), next_n, num_keys, columns, 0, 1)
    for i, (window, own) in enumerate(zip(found, each, strict=True)):
        number = of_rows[i]
        seen = number - next_n + i % next_n + 1
        assert window == (0, min(max(seen, 0), num_keys, columns)), (number, i % next_n)
        assert own == (0, min(max(number, 0), num_keys, columns)), number
