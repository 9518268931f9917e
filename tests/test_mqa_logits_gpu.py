"""The MQA logits kernels on a Hopper GPU: the grid of case C22, lengths at the end of an allocation, bits."""

from __future__ import annotations

from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

from helpers_mqa import POISON, counts_of, dense_problem, oracle, paged_problem, random_windows, windowed  # noqa: E402

from megamoe.kernels import gemm, mqa_logits  # noqa: E402
from megamoe.kernels.mqa_reference import paged_metadata  # noqa: E402

pytestmark = pytest.mark.gpu

# Relative L2 over the output. FP32: the tensor core keeps 13 bits of the products that it adds; BF16: its rounding.
LIMIT = {torch.float32: 3e-4, torch.bfloat16: 3e-3}
CONTEXTS = [1, 63, 64, 65, 4097]
REPEATS = 20


def int32(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def at_the_end(values: torch.Tensor) -> torch.Tensor:
    """Return the values where an allocation ends: a read behind them is one outside of it, for a sanitizer at least."""
    storage = torch.full((1 << 19,), 2**30, dtype=torch.int32, device="cuda")
    target = storage[storage.numel() - values.numel() :].view_as(values)
    return target.copy_(values)


def check(out: torch.Tensor, expected: torch.Tensor, limit: float | None = None) -> None:
    poison = torch.tensor(POISON).to(out.dtype).double().item()
    kept = expected == POISON
    assert bool((out[kept].double() == poison).all()), "a column that is not the row's was written"
    clean = expected == float("-inf")
    assert torch.equal(out == float("-inf"), clean)
    written = ~(kept | clean)
    if written.any():
        exact = expected[written]
        error = (out.double()[written] - exact).norm() / exact.norm()
        assert float(error) <= (limit or LIMIT[out.dtype]), float(error)


def check_bits(call: Callable[[torch.Tensor], object], out: torch.Tensor) -> None:
    first = out.clone()
    for _ in range(REPEATS):
        out.fill_(POISON)
        call(out)
        assert torch.equal(out.view(torch.uint8), first.view(torch.uint8))


@pytest.mark.parametrize("fp4", [False, True], ids=["fp8", "fp4"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("heads", [8, 32, 64])
@pytest.mark.parametrize("next_n", [1, 2, 3])
@pytest.mark.parametrize("page", [16, 64, 256])
def test_paged_grid(page: int, next_n: int, heads: int, head_dim: int, fp4: bool) -> None:
    torch.manual_seed(page * heads + next_n)
    problem = paged_problem(CONTEXTS, next_n, heads, head_dim, page, fp4, "cuda")
    lengths, columns = int32(CONTEXTS), max(CONTEXTS) + 3
    for clean in (False, True):
        out = torch.full((len(CONTEXTS) * next_n, columns), POISON, device="cuda")
        problem.call(lengths, columns, clean_logits=clean, out=out)
        check(out, problem.expected(counts_of(CONTEXTS, next_n), columns, clean))
    if page == 64 and head_dim == 128:
        check_bits(lambda target: problem.call(lengths, columns, clean_logits=True, out=target), out)


@pytest.mark.parametrize("fp4", [False, True], ids=["fp8", "fp4"])
@pytest.mark.parametrize(("heads", "head_dim"), [(16, 32), (64, 128)])
@pytest.mark.parametrize("page", [32, 128])
def test_paged_rest(page: int, heads: int, head_dim: int, fp4: bool) -> None:
    torch.manual_seed(0)
    lengths = [0, 700, 256, 0, 511, 1, 0]
    problem = paged_problem(lengths, 4, heads, head_dim, page, fp4, "cuda", gap=64)
    of_rows = [[max(length - 7 * i, 0) for i in range(4)] for length in lengths]
    for dtype in (torch.float32, torch.bfloat16):
        # fewer columns than keys, rows of the output apart from each other
        out = torch.full((28, 640), POISON, device="cuda", dtype=dtype)
        problem.call(int32(of_rows), 600, clean_logits=True, logits_dtype=dtype, out=out[:, :600])
        check(out[:, :600], problem.expected([n for row in of_rows for n in row], 600, True))
        assert bool((out[:, 600:] == torch.tensor(POISON).to(dtype)).all())


@pytest.mark.parametrize("fp4", [False, True], ids=["fp8", "fp4"])
@pytest.mark.parametrize(("heads", "head_dim"), [(8, 128), (16, 64), (32, 32), (32, 128), (64, 64), (64, 128)])
@pytest.mark.parametrize("num_keys", [1, 125, 4095])
def test_dense_grid(num_keys: int, heads: int, head_dim: int, fp4: bool) -> None:
    torch.manual_seed(heads + num_keys)
    rows = 45
    problem = dense_problem(rows, heads, head_dim, num_keys, fp4, "cuda")
    starts, ends = random_windows(rows, num_keys)
    exact = oracle(problem.exact_q, problem.exact_keys, problem.weights)
    for clean, columns, dtype in (
        (True, 0, torch.float32),
        (False, 0, torch.float32),
        (True, 0, torch.bfloat16),
        (False, 100, torch.float32),
        (True, 5000, torch.float32),
    ):
        out = torch.full((rows, columns or num_keys), POISON, device="cuda", dtype=dtype)
        problem.call(problem.weights, int32(starts), int32(ends), clean, columns, logits_dtype=dtype, out=out)
        check(out, windowed(exact, starts, ends, out.shape[1], columns > 0, clean))


@pytest.mark.parametrize("fp4", [False, True], ids=["fp8", "fp4"])
def test_dense_bits_do_not_depend_on_the_call(fp4: bool) -> None:
    torch.manual_seed(0)
    rows, num_keys = 203, 3001
    problem = dense_problem(rows, 64, 128, num_keys, fp4, "cuda")
    windows = int32([0] * rows), int32([num_keys] * rows)
    whole = torch.full((rows, num_keys), POISON, device="cuda")

    def call(target: torch.Tensor) -> None:
        problem.call(problem.weights, *windows, out=target)

    call(whole)
    check_bits(call, whole)
    function = mqa_logits.fp8_fp4_mqa_logits if fp4 else mqa_logits.fp8_mqa_logits
    parts = torch.full_like(whole, POISON)
    for first, last in ((0, 1), (1, 4), (4, 111), (111, rows)):
        part = slice(first, last)
        q = tuple(t[part] for t in problem.q) if fp4 else problem.q[part]
        function(q, problem.kv, problem.weights[part], *(w[part] for w in windows), out=parts[part])
    assert torch.equal(parts, whole)
    gemm.set_num_sms(7)
    try:
        few = torch.full_like(whole, POISON)
        call(few)
    finally:
        gemm.set_num_sms(None)
    assert torch.equal(few, whole)
    starts = int32([(37 * row) % 2000 for row in range(rows)])
    narrow = problem.call(problem.weights, starts, windows[1], False, num_keys)
    for row in (0, 1, 50, rows - 1):
        start = int(starts[row])
        assert torch.equal(narrow[row, : num_keys - start], whole[row, start:])


@pytest.mark.parametrize("next_n", [1, 3])
def test_paged_bits_are_those_of_neighbouring_keys(next_n: int) -> None:
    torch.manual_seed(0)
    length = 777
    problem = paged_problem([length], next_n, 64, 128, 64, False, "cuda")
    q, cache, weights, table = problem.arguments
    paged = problem.call(int32([[length] * next_n]), length)
    pages = cache.view(cache.shape[0], -1)[table[0].long()]
    keys = pages[:, : 64 * 128].reshape(-1, 128)[:length].view(torch.float8_e4m3fn)
    scales = pages[:, 64 * 128 :].contiguous().view(torch.float32).flatten()[:length]
    rows = int32([0] * next_n), int32([length] * next_n)
    dense = mqa_logits.fp8_mqa_logits(q[0], (keys.contiguous(), scales.contiguous()), weights, *rows)
    assert torch.equal(paged, dense)


@pytest.mark.parametrize("batches", [1, 32, 256])
def test_all_lengths_zero_at_the_end_of_an_allocation(batches: int) -> None:
    torch.manual_seed(0)
    problem = paged_problem([0] * batches, 1, 64, 128, 64, False, "cuda")
    q, cache, weights, table = problem.arguments
    lengths = at_the_end(int32([0] * batches))
    schedule = at_the_end(mqa_logits.get_paged_mqa_logits_metadata(lengths, 64, 132))
    assert schedule.tolist() == [[batches, 0]] * 133
    out = torch.full((batches, 70), POISON, device="cuda")
    mqa_logits.fp8_paged_mqa_logits(q, cache, weights, lengths, at_the_end(table), schedule, 70, True, out=out)
    assert bool((out == float("-inf")).all())


@pytest.mark.parametrize(("batches", "next_n"), [(1, 1), (7, 2), (300, 1), (1000, 4)])
@pytest.mark.parametrize("shares", [1, 5, 132])
def test_the_schedule_is_that_of_the_host(batches: int, next_n: int, shares: int) -> None:
    generator = torch.Generator().manual_seed(batches)
    lengths = torch.randint(0, 9000, (batches, next_n), generator=generator, dtype=torch.int32)
    lengths[::3] = 0
    found = mqa_logits.get_paged_mqa_logits_metadata(at_the_end(lengths.cuda()), 64, shares)
    assert torch.equal(found.cpu(), paged_metadata(lengths, shares))


def test_the_ends_of_int32_are_windows_and_lengths_like_others() -> None:
    torch.manual_seed(0)
    low, high = -(2**31), 2**31 - 1
    problem = dense_problem(5, 64, 128, 300, False, "cuda")
    starts, ends = [5, 0, low, high, 290], [low, low + 3, high, low, high]
    exact = oracle(problem.exact_q, problem.exact_keys, problem.weights)
    for columns in (0, 100):
        out = torch.full((5, columns or 300), POISON, device="cuda")
        problem.call(problem.weights, int32(starts), int32(ends), True, columns, out=out)
        check(out, windowed(exact, starts, ends, out.shape[1], columns > 0, True))
    lengths = [low, 1 - 2**31, -3, high]
    paged = paged_problem([64] * 4, 3, 64, 128, 64, False, "cuda")
    out = torch.full((12, 64), POISON, device="cuda")
    paged.call(int32(lengths), 64, clean_logits=True, out=out)
    check(out, paged.expected(counts_of(lengths, 3), 64, True))


def test_names_of_no_page_read_as_zeros() -> None:
    torch.manual_seed(0)
    problem = paged_problem([64, 64], 1, 8, 32, 16, False, "cuda")
    table = problem.arguments[3]
    table[0, 1], table[1, 3] = -5, 10**6
    out = problem.call(int32([64, 64]), 64)
    assert bool((out[0, 16:32] == 0).all()) and bool((out[1, 48:] == 0).all()) and bool(out.isfinite().all())


def test_not_a_number_is_not_hidden() -> None:
    torch.manual_seed(0)
    problem = dense_problem(3, 64, 128, 200, False, "cuda")
    problem.kv[0].view(torch.uint8)[17, 5] = 0x7F
    out = problem.call(problem.weights, int32([0] * 3), int32([200] * 3))
    assert bool(out[:, 17].isnan().all()) and int(out.isnan().sum()) == 3


def test_scales_far_apart_are_exact_down_to_2_to_the_11() -> None:
    torch.manual_seed(0)
    problem = dense_problem(4, 64, 128, 300, True, "cuda")
    (q, q_scales), (k, k_scales) = problem.q, problem.kv
    q_scales.copy_(torch.randint(110, 122, q_scales.shape, dtype=torch.uint8))
    k_scales.copy_(torch.randint(100, 112, k_scales.shape, dtype=torch.uint8))
    from megamoe.kernels.formats import dequantize_mxfp4

    exact = oracle(dequantize_mxfp4(q, q_scales), dequantize_mxfp4(k, k_scales), problem.weights)
    out = problem.call(problem.weights, int32([0] * 4), int32([300] * 4))
    check(out, exact, 1e-3)
