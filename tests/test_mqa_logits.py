"""MQA logits on the CPU against their definition in FP64; schedule of paged logits, refusals, how the kernels build."""

from __future__ import annotations

import importlib
import os
import struct
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from helpers_mqa import (  # noqa: E402
    E4M3,
    POISON,
    counts_of,
    dense_problem,
    oracle,
    paged_problem,
    random_windows,
    windowed,
)
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from megamoe.config import MoEConfig  # noqa: E402
from megamoe.kernels import mqa_instances, mqa_launch, mqa_logits  # noqa: E402
from megamoe.kernels.jit import JitSettings, build, driver  # noqa: E402
from megamoe.kernels.mqa_instances import all_instances, metadata_source  # noqa: E402
from megamoe.kernels.mqa_reference import paged_metadata  # noqa: E402
from megamoe.kernels.warmup import warmup_sources  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 4e-3}  # of the largest logit: FP32 sums, BF16 rounding


def benchmark_module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return benchmarks/mqa_logits.py; it and what it imports are forgotten afterwards."""
    folder = ROOT / "benchmarks"
    monkeypatch.syspath_prepend(str(folder))
    for path in folder.glob("*.py"):
        monkeypatch.delitem(sys.modules, path.stem, raising=False)
    return importlib.import_module("mqa_logits")


def check(out: torch.Tensor, expected: torch.Tensor) -> None:
    written = expected.isfinite() & (expected != POISON)
    assert torch.equal(out[~written].double(), expected[~written])
    if written.any():
        error = (out.double() - expected)[written].abs().max() / expected[written].abs().max()
        assert error <= TOLERANCE[out.dtype], float(error)


def int32(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("fp4", [False, True], ids=["fp8", "fp4"])
@pytest.mark.parametrize(("heads", "head_dim"), [(8, 32), (64, 128)])
@pytest.mark.parametrize("clean", [False, True], ids=["as-is", "clean"])
@pytest.mark.parametrize("columns", [0, 1, 40, 140], ids=lambda c: f"columns{c}")
def test_dense_is_the_definition(fp4: bool, heads: int, head_dim: int, clean: bool, columns: int) -> None:
    torch.manual_seed(heads + columns)
    rows, num_keys = 23, 125
    problem = dense_problem(rows, heads, head_dim, num_keys, fp4)
    starts, ends = random_windows(rows, num_keys)
    dtype = torch.bfloat16 if clean and columns == 40 else torch.float32
    out = torch.full((rows, columns or num_keys), POISON, dtype=dtype)
    returned = problem.call(
        problem.weights, int32(starts), int32(ends), clean, columns, logits_dtype=dtype, out=out
    )  # fmt: skip
    assert returned is out
    logits = oracle(problem.exact_q, problem.exact_keys, problem.weights)
    poison = torch.tensor(POISON).to(dtype).double()
    expected = windowed(logits, starts, ends, out.shape[1], columns > 0, clean)
    check(out, torch.where(expected == POISON, poison, expected)) if dtype == torch.float32 else check(out, expected)


def test_the_defaults_clean_and_allocate() -> None:
    torch.manual_seed(0)
    problem = dense_problem(5, 8, 32, 45, False)
    starts, ends = [0, 3, 45, 7, -2], [45, 9, 45, 2, 100]
    out = problem.call(problem.weights, int32(starts), int32(ends))
    assert out.shape == (5, 45) and out.dtype == torch.float32 and out.stride(1) == 1
    check(out, windowed(oracle(problem.exact_q, problem.exact_keys, problem.weights), starts, ends, 45, False, True))


@pytest.mark.parametrize(("rows", "num_keys"), [(0, 10), (3, 0), (0, 0)])
@pytest.mark.parametrize("fp4", [False, True], ids=["fp8", "fp4"])
def test_nothing_to_compute(rows: int, num_keys: int, fp4: bool) -> None:
    problem = dense_problem(rows, 8, 64, num_keys, fp4)
    windows = int32([0] * rows), int32([7] * rows)
    assert problem.call(problem.weights, *windows).shape == (rows, num_keys)
    wide = problem.call(problem.weights, *windows, True, 6)
    assert wide.shape == (rows, 6) and (num_keys > 0 or bool((wide == float("-inf")).all()))


def test_fp8_through_the_mixed_name_is_fp8() -> None:
    torch.manual_seed(0)
    problem = dense_problem(4, 16, 64, 33, False)
    windows = int32([0, 1, 2, 3]), int32([33, 20, 2, 9])
    mixed = mqa_logits.fp8_fp4_mqa_logits((problem.q, None), problem.kv, problem.weights, *windows)
    assert torch.equal(mixed, problem.call(problem.weights, *windows))


@pytest.mark.parametrize("head_dim", [32, 64, 128])
def test_scales_as_bytes_are_scales_as_words(head_dim: int) -> None:
    torch.manual_seed(0)
    problem = dense_problem(4, 8, head_dim, 20, True)
    windows = int32([0] * 4), int32([20] * 4)
    expected = problem.call(problem.weights, *windows)

    def words(scales: torch.Tensor) -> torch.Tensor:
        full = torch.full((*scales.shape[:-1], 4), 0xA5, dtype=torch.uint8)  # what is above the codes means nothing
        full[..., : head_dim // 32] = scales
        return full.view(torch.int32).squeeze(-1)

    (q, q_scales), (k, k_scales) = problem.q, problem.kv
    for kind in (words, lambda scales: scales.view(torch.float8_e8m0fnu)):
        for codes in (torch.uint8, torch.int8):
            pairs = (q.view(codes), kind(q_scales)), (k.view(codes), kind(k_scales))
            assert torch.equal(mqa_logits.fp8_fp4_mqa_logits(*pairs, problem.weights, *windows), expected)


LENGTHS = [1, 63, 0, 64, 65, 260, 2]


@pytest.mark.parametrize("fp4", [False, True], ids=["fp8", "fp4"])
@pytest.mark.parametrize("page", mqa_instances.PAGES)
@pytest.mark.parametrize("next_n", [1, 2, 3, 4])
def test_paged_is_the_definition(fp4: bool, page: int, next_n: int) -> None:
    torch.manual_seed(page + next_n)
    heads, head_dim = (8, 64) if next_n % 2 else (16, 32)
    problem = paged_problem(LENGTHS, next_n, heads, head_dim, page, fp4, gap=16 * (next_n - 1))
    clean = next_n % 2 == 0
    counts = counts_of(LENGTHS, next_n)
    out = torch.full((len(counts), 250), POISON)
    assert problem.call(int32(LENGTHS), 250, clean_logits=clean, out=out) is out
    check(out, problem.expected(counts, 250, clean))
    rows = [[max(length - 3 * i, 0) for i in range(next_n)] for length in LENGTHS]
    out.fill_(POISON)
    problem.call(torch.tensor(rows, dtype=torch.int32), 250, clean_logits=clean, out=out)
    check(out, problem.expected([count for row in rows for count in row], 250, clean))


def test_paged_keys_beyond_the_table_are_left_out() -> None:
    torch.manual_seed(0)
    problem = paged_problem([40, 64], 1, 8, 32, 16, False)
    out = problem.call(int32([4000, 64]), 100, clean_logits=True)
    assert bool((out[:, 64:] == float("-inf")).all()) and bool(out[:, :64].isfinite().all())


@given(
    lengths=st.lists(st.integers(0, 5000), max_size=40),
    shares=st.integers(1, 140),
    next_n=st.sampled_from([None, 1, 3]),
)
@settings(max_examples=60, deadline=None)
def test_shares_are_even_and_cover_everything(lengths: list[int], shares: int, next_n: int | None) -> None:
    tensor = torch.tensor(lengths, dtype=torch.int32)
    if next_n is not None:
        tensor = torch.stack([(tensor - i).clamp(min=0) for i in range(next_n)], dim=1)
    schedule = mqa_logits.get_paged_mqa_logits_metadata(tensor.contiguous(), 64, shares)
    assert schedule.shape == (shares + 1, 2) and schedule.dtype == torch.int32
    splits = [(batch, i) for batch, length in enumerate(lengths) for i in range(-(-length // 256))]
    places = [tuple(place) for place in schedule.tolist()]
    assert places[-1] == (len(lengths), 0)
    if not splits:
        assert places == [(len(lengths), 0)] * (shares + 1)
        return
    index = {split: i for i, split in enumerate(splits)} | {(len(lengths), 0): len(splits)}
    begins = [index[place] for place in places]
    assert begins[0] == 0 and begins == sorted(begins)
    assert {b - a for a, b in zip(begins, begins[1:], strict=False)} <= {
        len(splits) // shares,
        -(-len(splits) // shares),
    }


def test_the_ends_of_int32_are_windows_like_others() -> None:
    problem = dense_problem(4, 8, 32, 20, False)
    low, high = -(2**31), 2**31 - 1
    starts, ends = int32([5, 0, low, high]), int32([low, low + 3, high, low])
    for columns in (0, 20):
        logits = problem.call(problem.weights, starts, ends, max_seqlen_k=columns)
        assert logits.isfinite().sum(1).tolist() == [0, 0, 20, 0]


def test_the_ends_of_int32_are_lengths_like_others() -> None:
    problem = paged_problem([5, 5, 5, 5], 3, 8, 32, 16, False)
    logits = problem.call(int32([-(2**31), 1 - 2**31, -3, 2**31 - 1]), 40, clean_logits=True)
    assert logits.isfinite().sum(1).tolist() == [0] * 9 + [16] * 3


def test_a_cache_without_pages_has_no_keys() -> None:
    given = paged_arguments(kv_cache=cache_of(0, 16, 1, 36), clean_logits=True)
    assert bool((mqa_logits.fp8_paged_mqa_logits(**given) == -torch.inf).all())


def test_there_is_no_gradient_on_a_cpu_either() -> None:
    weights = torch.zeros(4, 8, requires_grad=True)
    logits = mqa_logits.fp8_mqa_logits(**arguments(weights=weights, out=torch.empty(4, 10, requires_grad=True)))
    assert logits.grad_fn is None
    assert not mqa_logits.fp8_mqa_logits(**arguments(weights=weights)).requires_grad


def test_a_power_of_two_in_scales_is_a_power_of_two_in_logits() -> None:
    torch.manual_seed(0)
    problem = dense_problem(3, 8, 128, 30, True)
    windows = int32([0] * 3), int32([30] * 3)
    once = problem.call(problem.weights, *windows)
    (q, q_scales), (k, k_scales) = problem.q, problem.kv
    moved = mqa_logits.fp8_fp4_mqa_logits((q, q_scales + 3), (k, k_scales - 5), problem.weights, *windows)
    assert torch.equal(moved, once * 2.0**-2)


def arguments(**changes: Any) -> dict[str, Any]:
    given: dict[str, Any] = {
        "q": torch.zeros(4, 8, 32).to(E4M3),
        "kv": (torch.zeros(10, 32).to(E4M3), torch.ones(10)),
        "weights": torch.zeros(4, 8),
        "cu_seq_len_k_start": int32([0] * 4),
        "cu_seq_len_k_end": int32([10] * 4),
    }
    return given | changes


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"q": torch.zeros(4, 8, 32)}, "q: must be float8_e4m3fn, got float32"),
        ({"q": torch.zeros(4, 12, 32).to(E4M3)}, "q: heads: must be one of 8, 16, 32, 64, got 12"),
        ({"q": torch.zeros(4, 8, 96).to(E4M3)}, "q: head_dim: must be one of 32, 64, 128, got 96"),
        ({"q": torch.zeros(4, 32).to(E4M3)}, r"q: must be \[rows, heads, head_dim\], got \[4, 32\]"),
        ({"q": torch.zeros(4, 32, 8).to(E4M3).transpose(1, 2)}, "q: must be contiguous"),
        ({"q": None}, "q: must be a tensor, got NoneType"),
        ({"kv": torch.zeros(10, 32)}, "kv: must be a pair"),
        ({"kv": (torch.zeros(10, 64).to(E4M3), torch.ones(10))}, r"kv: must be contiguous \[num_keys, 32\]"),
        ({"kv": (torch.zeros(10, 32).to(E4M3), torch.ones(9))}, r"kv scales: must be \[num_keys\] = \[10\], got \[9\]"),
        ({"kv": (torch.zeros(10, 32).to(E4M3), torch.ones(10).double())}, "kv scales: must be float32, got float64"),
        ({"weights": torch.zeros(4, 16)}, r"weights: must be \[rows, heads\] = \[4, 8\], got \[4, 16\]"),
        ({"weights": torch.zeros(4, 8).half()}, "weights: must be float32, got float16"),
        ({"weights": torch.zeros(8, 4).t()}, "weights: heads must be neighbours"),
        ({"cu_seq_len_k_start": int32([0] * 3)}, r"cu_seq_len_k_start: must be \[rows\] = \[4\], got \[3\]"),
        ({"cu_seq_len_k_end": torch.zeros(4)}, "cu_seq_len_k_end: must be int32, got float32"),
        ({"max_seqlen_k": -1}, "max_seqlen_k: must be from 0 to"),
        ({"logits_dtype": torch.float16}, "logits_dtype: must be float32 or bfloat16, got float16"),
        ({"weights": torch.zeros(4, 8, device="meta")}, "weights: must be on the device of q, cpu, got meta"),
        (
            {"kv": (torch.zeros(10, 32).to(E4M3), torch.ones(10, device="meta"))},
            "kv_scales: must be on the device of q",
        ),
        ({"max_seqlen_k": 2**30 + 1}, "max_seqlen_k: must be from 0 to 1073741824, got 1073741825"),
        ({"max_seqlen_k": 1.5}, "max_seqlen_k: must be a whole number, got 1.5"),
        ({"out": torch.zeros(4, 9)}, r"out: must be \[rows, columns\] = \[4, 10\], got \[4, 9\]"),
        ({"out": torch.zeros(10, 4).t()}, "out: columns must be neighbours"),
        ({"out": torch.zeros(4, 10).bfloat16()}, "out: must be float32, got bfloat16"),
    ],
)
def test_refusals_name_the_rule(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        mqa_logits.fp8_mqa_logits(**arguments(**changes))
    assert "\n" not in str(caught.value)


def test_refusals_of_the_mixed_name() -> None:
    codes = torch.zeros(4, 8, 16, dtype=torch.uint8), torch.zeros(4, 8, dtype=torch.int32)
    keys = torch.zeros(10, 16, dtype=torch.uint8), torch.zeros(10, dtype=torch.int32)
    call = mqa_logits.fp8_fp4_mqa_logits
    rest = torch.zeros(4, 8), int32([0] * 4), int32([10] * 4)
    with pytest.raises(ValueError, match="schedule_meta: must be None"):
        call(codes, keys, *rest, schedule_meta=int32([0]))
    with pytest.raises(ValueError, match="q scales: must be int32 or uint8 or float8_e8m0fnu, got float32"):
        call((codes[0], torch.zeros(4, 8)), keys, *rest)
    with pytest.raises(ValueError, match=r"kv scales: must be one word for each row of codes, = \[10\], got \[9\]"):
        call(codes, (keys[0], keys[1][:9]), *rest)
    with pytest.raises(ValueError, match="kv: must be uint8 or int8"):
        call(codes, (torch.zeros(10, 16).to(E4M3), torch.ones(10)), *rest)


def paged_arguments(**changes: Any) -> dict[str, Any]:
    given: dict[str, Any] = {
        "q": torch.zeros(2, 1, 8, 32).to(E4M3),
        "kv_cache": torch.zeros(3, 16, 1, 36, dtype=torch.uint8),
        "weights": torch.zeros(2, 8),
        "context_lens": int32([3, 4]),
        "block_table": torch.zeros(2, 1, dtype=torch.int32),
        "schedule_meta": torch.zeros(3, 2, dtype=torch.int32),
        "max_context_len": 20,
    }
    return given | changes


def cache_of(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"q": torch.zeros(2, 5, 8, 32).to(E4M3)}, "q: next_n: must be one of 1, 2, 3, 4, got 5"),
        ({"q": torch.zeros(2, 1, 48, 32).to(E4M3)}, "q: heads: must be one of 8, 16, 32, 64, got 48"),
        ({"kv_cache": cache_of(3, 24, 1, 36)}, "kv_cache: page: must be one of 16, 32, 64, 128, 256, got 24"),
        ({"kv_cache": cache_of(3, 16, 1, 32)}, r"kv_cache: must be \[num_pages, page, 1, 36\], got \[3, 16, 1, 32\]"),
        ({"kv_cache": cache_of(3, 16, 1, 36).float()}, "kv_cache: must be uint8, got float32"),
        ({"kv_cache": cache_of(3, 16, 1, 40)[..., :36]}, "kv_cache: strides must be"),
        ({"context_lens": int32([3])}, r"context_lens: must be \[batches\] = \[2\] or \[batches, next_n\] = \[2, 1\]"),
        ({"context_lens": torch.zeros(2)}, "context_lens: must be int32, got float32"),
        ({"block_table": torch.zeros(3, 1, dtype=torch.int32)}, r"block_table: must be \[batches, num_blocks\] = \[2"),
        (
            {"schedule_meta": torch.zeros(1, 2, dtype=torch.int32)},
            r"schedule_meta: must be contiguous \[num_sms \+ 1, 2\]",
        ),
        ({"max_context_len": -1}, "max_context_len: must be from 0 to"),
        ({"indices": int32([0, 1])}, "indices: must be None"),
        ({"weights": torch.zeros(2, 16)}, r"weights: must be \[rows, heads\] = \[2, 8\], got \[2, 16\]"),
    ],
)
def test_paged_refusals_name_the_rule(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        mqa_logits.fp8_paged_mqa_logits(**paged_arguments(**changes))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ((torch.zeros(2), 64, 4), "context_lens: must be int32"),
        ((torch.zeros(2, 2, 2, dtype=torch.int32), 64, 4), "context_lens: must be contiguous"),
        ((int32([1]), 48, 4), "block_kv: must be one of 16, 32, 64, 128, 256, got 48"),
        ((int32([1]), 64, 0), "num_sms: must be at least 1, got 0"),
        ((int32([1]), torch.ones(2), 4), "block_kv: must be a whole number"),
        ((int32([1]), 64, None), "num_sms: must be a whole number, got None"),
        ((int32([1]), 64, 4, int32([0])), "indices: must be None"),
    ],
)
def test_metadata_refusals_name_the_rule(given: tuple[Any, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        mqa_logits.get_paged_mqa_logits_metadata(*given)


# ---- the host side of a launch ---------------------------------------------------------------------------------------


class FakeDriver:
    """Keeps the maps that a plan asks for, and what would have been launched."""

    def __init__(self) -> None:
        self.maps: list[tuple[Any, ...]] = []
        self.addresses: list[int] = []
        self.launches = 0

    def encode_tensor_map(self, target: int, address: int, *rest: Any, **how: Any) -> None:
        self.maps.append((address, *rest, how))

    def replace_address(self, target: int, address: int) -> None:
        self.addresses.append(address)

    def launch(self, *_: Any) -> int:
        self.launches += 1
        return 0


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    """CPU tensors take the way of CUDA tensors up to the driver call."""
    found = FakeDriver()
    monkeypatch.setattr(driver, "_driver", found)
    monkeypatch.setattr(mqa_launch, "load", lambda source, device: SimpleNamespace(address=4096))
    monkeypatch.setattr(mqa_logits, "_has_kernels", lambda tensor: True)
    monkeypatch.setattr(mqa_logits, "_current_stream", lambda device: 7)
    monkeypatch.setattr(mqa_logits, "_plans", SimpleNamespace())
    monkeypatch.setattr(mqa_logits, "get_num_sms", lambda: 999)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.no_grad())
    return found


def plans() -> list[Any]:
    return list(mqa_logits._plans.known.values())


def test_a_dense_launch_gets_its_arguments(fake: FakeDriver) -> None:
    problem = dense_problem(9, 64, 128, 1000, False)
    starts, ends = int32([0] * 9), int32([5] * 9)
    out = torch.empty(9, 1024)[:, :1000]
    problem.call(problem.weights, starts, ends, out=out)
    (plan,) = plans()
    instance = mqa_instances.select_dense(64, 128, False, False)
    assert plan.grid == 132 and fake.launches == 1
    keys, scales = problem.kv
    assert fake.maps == [
        (problem.q.data_ptr(), (128, 9 * 64), (128,), (128, 64 * instance.queries), {}),
        (keys.data_ptr(), (128, 1000, 1), (128, 128000), (128, instance.keys, 1), {"swizzled": True}),
        (scales.data_ptr(), (1000, 1), (4000,), (instance.keys, 1), {"words": True, "swizzled": False}),
    ]
    pointers = struct.unpack_from("<9Q", plan.bytes, 384)
    at = problem.weights.data_ptr(), starts.data_ptr(), ends.data_ptr(), 0, 0, out.data_ptr(), 0
    assert pointers == (0, 0, *at)
    sizes = struct.unpack_from("<3q11i", plan.bytes, 384 + 72)
    assert sizes == (1024, 64, 0, 9, 1000, 1000, 1, 0, 0, 0, 0, 1, 0, 0)


def test_a_paged_launch_gets_its_arguments(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = paged_problem([100, 40], 2, 32, 64, 32, False, gap=48)
    q, cache, weights, table = problem.arguments
    lengths, schedule = int32([100, 40]), torch.zeros(6, 2, dtype=torch.int32)
    out = torch.empty(4, 128)
    mqa_logits.fp8_paged_mqa_logits(q, cache, weights, lengths, table, schedule, 128, True, out=out)
    (plan,) = plans()
    pages = cache.shape[0]
    assert plan.grid == 5
    assert fake.maps == [
        (q.data_ptr(), (64, 4 * 32), (64,), (128, 64), {}),
        (cache.data_ptr(), (64, 32, pages), (64, 32 * 68 + 48), (128, 32, 1), {"swizzled": True}),
    ]
    at = weights.data_ptr(), 0, lengths.data_ptr(), table.data_ptr(), schedule.data_ptr(), out.data_ptr()
    assert struct.unpack_from("<9Q", plan.bytes, 384) == (0, 0, *at, cache.data_ptr() + 32 * 64)
    sizes = struct.unpack_from("<3q11i", plan.bytes, 384 + 72)
    assert sizes == (128, 32, 32 * 68 + 48, 2, 4 * 32, 128, 2, 4, pages, 32, 5, 1, 0, 0)


def test_row_slices_share_a_plan_and_move_its_addresses(fake: FakeDriver) -> None:
    problem = dense_problem(8, 8, 32, 64, False)
    out = torch.empty(8, 64)
    for first in (0, 4):
        part = slice(first, first + 4)
        windows = int32([0] * 8)[part], int32([64] * 8)[part]
        mqa_logits.fp8_mqa_logits(problem.q[part], problem.kv, problem.weights[part], *windows, out=out[part])
    (plan,) = plans()
    assert fake.launches == 2 and fake.addresses == [problem.q[4:].data_ptr()]
    pointers = struct.unpack_from("<9Q", plan.bytes, 384)
    assert pointers[2] == problem.weights[4:].data_ptr() and pointers[7] == out[4:].data_ptr()


def test_operands_off_a_16_byte_boundary_are_copied(fake: FakeDriver) -> None:
    keys = torch.zeros(40, 32).to(E4M3)
    scales = torch.ones(41)[1:]
    q = torch.zeros(4 * 8 * 32 + 3, dtype=torch.uint8)[3:].view(4, 8, 32).view(E4M3)
    windows = int32([0] * 4), int32([40] * 4)
    mqa_logits.fp8_mqa_logits(q, (keys, scales), torch.zeros(4, 8), *windows)
    assert [at[0] % 16 for at in fake.maps] == [0, 0, 0]


# ---- the instances -------------------------------------------------------------------------------------------------


def test_every_instance_fits_and_has_its_own_name() -> None:
    instances = all_instances()
    assert len({instance.name for instance in instances}) == len(instances)
    for instance in instances:
        assert instance.shared_bytes <= 227 * 1024 and instance.stages >= 3, instance
        assert instance.keys <= 256 and instance.queries * instance.heads * instance.accumulators <= 256
        assert instance.rows >= 1 and (not instance.paged or 256 % instance.keys == 0), instance


def test_a_block_of_rows_holds_all_rows_of_a_batch() -> None:
    for heads in mqa_instances.HEADS:
        for next_n in range(1, mqa_instances.MAX_NEXT_N + 1):
            assert mqa_instances.select_paged(heads, 128, next_n, False, False).rows >= next_n


def test_warmup_has_the_logits_of_an_indexer() -> None:
    names = {source.name for source in warmup_sources(MoEConfig.from_yaml("deepseek_v4_flash"))}
    assert mqa_instances.select_dense(64, 128, False, False).name in names
    assert mqa_instances.select_paged(64, 128, 2, False, False).name in names
    assert metadata_source().name in names
    assert not any("mqa" in source.name for source in warmup_sources(MoEConfig.from_yaml("deepseek_v3")))


def test_every_benchmark_line_is_of_a_case_that_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = benchmark_module(monkeypatch)
    names = [bench.dense_name(*parts) for parts in bench.DENSE] + [bench.paged_name(*parts) for parts in bench.PAGED]
    assert len(set(names)) == len(names)
    assert {line.case for line in bench.LINES} <= set(names)


def test_benchmark_cases_check_what_they_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = benchmark_module(monkeypatch)
    monkeypatch.setattr(bench, "DEVICE", "cpu")
    monkeypatch.setattr(bench, "get_num_sms", lambda: 4)
    cases = [bench.dense_case(fp4, 9, 70, window) for fp4 in (False, True) for window in ("whole", "causal")]
    cases += [bench.paged_case(fp4, 3, 128, 2) for fp4 in (False, True)]
    for case in cases:
        assert not case.error() <= bench.LIMIT, case.name
        case.call()
        assert case.error() <= bench.LIMIT, case.name
        case.out[case.sample[0][0], 0] += 100
        assert case.error() > bench.LIMIT, case.name
    assert cases[1].flop == 2 * sum(range(62, 71)) * 64 * 128 and cases[4].flop == 2 * 3 * (127 + 128) * 64 * 128


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", mqa_instances.HEAD_DIMS)
@pytest.mark.parametrize("heads", mqa_instances.HEADS)
def test_every_instance_compiles_without_spills(heads: int, head_dim: int, tmp_path: Path) -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="cuda.core with NVRTC is not installed (megamoe[cuda13])")
    sources = [i.source() for i in mqa_instances.all_instances() if (i.heads, i.head_dim) == (heads, head_dim)]
    assert sources
    into = JitSettings(cache_dirs=(tmp_path,))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        usages = list(pool.map(lambda source: build(source, into).usage, [metadata_source(), *sources]))
    assert all(usage.is_clean for usage in usages), usages


def test_metadata_on_the_host_is_the_functions() -> None:
    lengths = int32([3, 0, 700])
    assert torch.equal(paged_metadata(lengths, 4), mqa_logits.get_paged_mqa_logits_metadata(lengths, 64, 4))
