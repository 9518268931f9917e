"""Top-k on the CPU: the same sets as torch.topk, ties, windows, what is never chosen, refusals; the kernels compile."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
hypothesis = pytest.importorskip("hypothesis")

from helpers_topk import expected_columns, strange_rows  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from megamoe.kernels.jit import JitSettings, build  # noqa: E402
from megamoe.kernels.topk import MAX_TOPK_COLUMNS, topk_indices, topk_sources  # noqa: E402


@pytest.mark.parametrize("source", topk_sources(), ids=lambda source: source.name)
def test_compiles_without_spills(source, tmp_path: Path) -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="cuda.core with NVRTC is not installed (megamoe[cuda13])")
    usage = build(source, JitSettings(cache_dirs=(tmp_path,))).usage
    assert usage.is_clean, usage


@hypothesis.given(
    rows=st.integers(1, 5),
    columns=st.integers(1, 300),
    k=st.integers(1, 320),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    levels=st.sampled_from([0, 1, 2, 7]),
    windows=st.booleans(),
    seed=st.integers(0, 2**31 - 1),
)
@hypothesis.settings(max_examples=150, deadline=None)
def test_the_set_is_what_sorting_finds(
    rows: int, columns: int, k: int, dtype: torch.dtype, levels: int, windows: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator)
    if levels:
        x = (x * levels).round() / levels  # many equal ones
    x[torch.rand(rows, columns, generator=generator) < 0.1] = -torch.inf
    x = x.to(dtype)
    starts = ends = None
    if windows:
        starts = torch.randint(-3, columns + 3, (rows,), generator=generator, dtype=torch.int32)
        ends = torch.randint(-3, columns + 3, (rows,), generator=generator, dtype=torch.int32)
    found = topk_indices(x, k, starts, ends, deterministic=True)
    assert found.tolist() == expected_columns(x, k, starts, ends)


def test_values_are_those_of_torch_topk() -> None:
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(17, 5000).to(dtype)
        found = topk_indices(x, 512).long()
        assert torch.equal(x.gather(1, found).sort(dim=1).values, x.topk(512).values.sort(dim=1).values)


def test_strange_rows() -> None:
    x = strange_rows(700)
    for k in (1, 300, 699, 701):
        assert topk_indices(x, k, deterministic=True).tolist() == expected_columns(x, k)


def test_nan_is_the_largest_and_masked_logits_are_never_chosen() -> None:
    nan, inf = float("nan"), float("inf")
    x = torch.tensor([[1.0, nan, -inf, inf, -nan, 0.0], [-inf] * 6, [0.0, -0.0, 0.0, -1.0, -0.0, -inf]])
    expected = [[1, 3, 4], [-1, -1, -1], [0, 1, 2]]
    assert topk_indices(x, 3, deterministic=True).tolist() == expected
    assert topk_indices(x, 6, deterministic=True)[2].tolist() == [0, 1, 2, 3, 4, -1]


def test_shifts_are_added_to_columns_alone() -> None:
    x = torch.tensor([[3.0, 1.0, 2.0], [5.0, 6.0, 4.0]])
    starts, ends = torch.tensor([1, 0], dtype=torch.int32), torch.tensor([3, 0], dtype=torch.int32)
    assert topk_indices(x, 2, starts, ends, shifts=-starts).tolist() == [[0, 1], [-1, -1]]
    out = torch.full((2, 5), 77, dtype=torch.int32)
    topk_indices(x.t().contiguous().t(), 3, shifts=starts, out=out[:, 1:4])
    assert out.tolist() == [[77, 1, 2, 3, 77], [77, 0, 1, 2, 77]]


def test_one_row_may_have_its_window_in_a_column() -> None:
    ends = torch.full((1, 4), 2, dtype=torch.int32)[:, 0]
    assert topk_indices(torch.ones(1, 8), 3, None, ends, deterministic=True).tolist() == [[0, 1, -1]]


def test_nothing_to_choose_from() -> None:
    assert topk_indices(torch.empty(0, 8), 3).shape == (0, 3)
    assert topk_indices(torch.empty(2, 0), 3).tolist() == [[-1] * 3] * 2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"logits": torch.zeros(4)}, "logits: must be float32 or bfloat16"),
        ({"logits": torch.zeros(2, 4, dtype=torch.float16)}, "got torch.float16"),
        ({"logits": torch.zeros(1, 1).expand(2, MAX_TOPK_COLUMNS + 1)}, "N <= 16777216"),
        ({"k": 0}, "k: must be from 1 to 2048, got 0"),
        ({"k": 1.5}, "k: must be a whole number, got 1.5"),
        ({"logits": None}, "logits: must be a tensor, got NoneType"),
        ({"starts": [0, 0]}, "starts: must be a tensor, got list"),
        ({"ends": torch.zeros(4, dtype=torch.int32)[::2]}, r"ends: must be contiguous .* strides \(2,\)"),
        ({"k": 2049}, "k: must be from 1 to 2048, got 2049"),
        ({"starts": torch.zeros(2)}, "starts: must be contiguous int32"),
        ({"ends": torch.zeros(3, dtype=torch.int32)}, r"ends: .* \[2\]"),
        ({"shifts": torch.zeros(2, dtype=torch.int64)}, "shifts"),
        ({"out": torch.zeros(2, 4, dtype=torch.int32)}, r"out: must be int32 \[2, 3\]"),
        ({"out": torch.zeros(3, 2, dtype=torch.int32).t()}, "unit column stride"),
    ],
)
def test_refusals_name_the_rule(change: dict[str, object], words: str) -> None:
    arguments = {"logits": torch.zeros(2, 4), "k": 3, **change}
    with pytest.raises(ValueError, match=words):
        topk_indices(**arguments)  # type: ignore[arg-type]


@pytest.fixture
def benchmark_module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return benchmarks/topk.py; it and what it imports are forgotten afterwards."""
    folder = Path(__file__).resolve().parents[1] / "benchmarks"
    monkeypatch.syspath_prepend(str(folder))
    for path in folder.glob("*.py"):
        monkeypatch.delitem(sys.modules, path.stem, raising=False)
    return importlib.import_module("topk")


def test_every_benchmark_line_is_of_a_case_that_is_measured(benchmark_module: Any) -> None:
    bench = benchmark_module
    names = [bench.topk_name(*case) for case in bench.CASES]
    names += [bench.pair_name(f"rows={rows} keys={keys}") for rows, keys in bench.PAIRS]
    assert len(set(names)) == len(names)
    assert {line.case for line in bench.LINES} <= set(names)


def test_the_benchmark_ends_on_a_wrong_choice(benchmark_module: Any) -> None:
    logits = torch.randn(3, 40)
    logits[1, 5:] = -torch.inf
    found = topk_indices(logits, 7)
    benchmark_module.check(found, logits, "case")
    for row, column, wrong in ((0, 3, int(logits[0].argmin())), (1, 6, 3), (2, 0, -1)):
        changed = found.clone()
        changed[row, column] = wrong
        with pytest.raises(SystemExit, match="case: not the values of torch.topk"):
            benchmark_module.check(changed, logits, "case")
