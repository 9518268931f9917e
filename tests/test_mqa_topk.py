"""Logits and top-k in parts choose what the two steps choose over all logits, whatever the budget."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from megamoe.kernels import mqa_logits  # noqa: E402
from megamoe.kernels.indexer_quantize import quantize_indexer, write_indexer_cache  # noqa: E402
from megamoe.kernels.mqa_topk import (  # noqa: E402
    fp8_fp4_mqa_topk,
    fp8_fp4_paged_mqa_topk,
    fp8_mqa_topk,
    fp8_paged_mqa_topk,
)
from megamoe.kernels.topk import topk_indices  # noqa: E402


def operands(rows: int, keys: int, heads: int, dim: int, format: str, device: str):
    """Return q (values, scales), kv, weights."""
    torch.manual_seed(rows + keys)
    q, q_scale = quantize_indexer(torch.randn(rows, heads, dim, device=device), format)
    kv = quantize_indexer(torch.randn(keys, dim, device=device), format)
    weights = torch.randn(rows, heads, device=device)
    if format == "fp8":
        return (q, None), kv, weights * q_scale
    return (q, q_scale), kv, weights


def windows(rows: int, keys: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return starts and ends: ordinary, empty, beyond the keys, whole."""
    generator = torch.Generator().manual_seed(rows)
    starts = torch.randint(-3, keys // 2, (rows,), generator=generator, dtype=torch.int32)
    ends = starts + torch.randint(0, keys, (rows,), generator=generator, dtype=torch.int32)
    starts[:3], ends[:3] = torch.tensor([5, 0, 7]), torch.tensor([5, keys, 3])
    return starts.to(device), ends.to(device)


def check_dense(rows: int, keys: int, heads: int, format: str, k: int, budgets: list[int], device: str) -> None:
    q, kv, weights = operands(rows, keys, heads, 64, format, device)
    starts, ends = windows(rows, keys, device)
    logits = mqa_logits.fp8_fp4_mqa_logits(q, kv, weights, starts, ends)
    expected = topk_indices(logits, k, deterministic=True)
    assert bool((expected[0] == -1).all()) and bool((expected[1, : min(k, keys)] >= 0).all())
    for budget in budgets:
        for longest in (0, keys):
            out = torch.full((rows, k), -9, dtype=torch.int32, device=device)
            fp8_fp4_mqa_topk(
                q, kv, weights, starts, ends, k, longest, max_logits_bytes=budget, deterministic=True, out=out
            )
            assert torch.equal(out, expected), (budget, longest)
    if format == "fp8":
        assert torch.equal(fp8_mqa_topk(q[0], kv, weights, starts, ends, k, deterministic=True), expected)


def check_paged(batches: int, next_n: int, page: int, format: str, k: int, budgets: list[int], device: str) -> None:
    heads, dim, blocks = 32, 64, 6
    longest = page * blocks - 5
    q, _, weights = operands(batches * next_n, 1, heads, dim, format, device)
    q = tuple(None if t is None else t.unflatten(0, (batches, next_n)) for t in q)
    width = dim + 4 if format == "fp8" else dim // 2 + 4
    cache = torch.zeros(batches * blocks, page, 1, width, dtype=torch.uint8, device=device)
    keys = torch.randn(cache.shape[0] * page, dim, device=device)
    write_indexer_cache(keys, cache, torch.arange(keys.shape[0], device=device), format)
    table = torch.randperm(batches * blocks).int().to(device).view(batches, blocks)
    lens = torch.randint(0, longest + 1, (batches,)).int()
    lens[0], lens[-1] = 0, longest
    lens = lens.to(device)
    meta = mqa_logits.get_paged_mqa_logits_metadata(lens, page, 132)
    logits = mqa_logits.fp8_fp4_paged_mqa_logits(q, cache, weights, lens, table, meta, longest, True)
    expected = topk_indices(logits, k, deterministic=True)
    assert bool((expected[:next_n] == -1).all())
    for budget in budgets:
        got = fp8_fp4_paged_mqa_topk(
            q, cache, weights, lens, table, meta, longest, k, max_logits_bytes=budget, deterministic=True
        )
        assert torch.equal(got, expected), budget
    more = longest + 100  # columns without a page
    got = fp8_fp4_paged_mqa_topk(q, cache, weights, lens, table, None, more, k, deterministic=True)
    assert torch.equal(got, expected)
    of_rows = (lens[:, None] + torch.arange(1 - next_n, 1, device=device)).clamp(min=0).int()
    if format == "fp8":
        got = fp8_paged_mqa_topk(q[0], cache, weights, of_rows, table, None, longest, k, deterministic=True)
        assert torch.equal(got, expected)


@pytest.mark.parametrize("format", ["fp8", "mxfp4"])
def test_parts_choose_what_all_logits_choose(format: str) -> None:
    check_dense(23, 333, 32, format, 64, [352 * 4, 5 * 352 * 4 + 3, 1 << 20], "cpu")


@pytest.mark.parametrize("format", ["fp8", "mxfp4"])
@pytest.mark.parametrize("next_n", [1, 3])
def test_paged_parts_choose_what_all_logits_choose(next_n: int, format: str) -> None:
    check_paged(5, next_n, 16, format, 40, [96 * 4 * next_n, 1 << 20], "cpu")


def test_refusals_name_the_rule() -> None:
    q, kv, weights = operands(4, 100, 8, 32, "fp8", "cpu")
    ends = torch.full((4,), 100, dtype=torch.int32)
    arguments = (q[0], kv, weights, torch.zeros_like(ends), ends)
    with pytest.raises(ValueError, match="must hold a row of 100 logits, 512 bytes, got 511"):
        fp8_mqa_topk(*arguments, 3, max_logits_bytes=511)
    with pytest.raises(ValueError, match="k: must be from 1 to 2048, got 0"):
        fp8_mqa_topk(*arguments, 0)
    with pytest.raises(ValueError, match=r"out: must be int32 \[4, 3\]"):
        fp8_mqa_topk(*arguments, 3, out=torch.zeros(4, 2, dtype=torch.int32))
    with pytest.raises(ValueError, match="logits_dtype"):
        fp8_mqa_topk(*arguments, 3, logits_dtype=torch.float16)
    with pytest.raises(ValueError, match="logits_dtype: must be float32 or bfloat16, got fp32"):
        fp8_mqa_topk(*arguments, 3, logits_dtype="fp32")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must hold the 2 rows of a batch of 64 logits, 512 bytes"):
        fp8_paged_mqa_topk(
            q[0].view(2, 2, 8, 32), torch.zeros(4, 16, 1, 36, dtype=torch.uint8), weights, ends[:2],
            torch.zeros(2, 4, dtype=torch.int32), None, 64, 3, max_logits_bytes=100,
        )  # fmt: skip

    with pytest.raises(ValueError, match="512 bytes, got -5"):
        fp8_mqa_topk(*arguments, 3, max_logits_bytes=-5)
    for place, name in enumerate(("q", "kv", "weights", "cu_seq_len_k_start", "cu_seq_len_k_end")):
        changed = [None if at == place else argument for at, argument in enumerate(arguments)]
        with pytest.raises(ValueError, match=f"^{name}: must be a "):
            fp8_mqa_topk(*changed, 3)
    with pytest.raises(ValueError, match="q: next_n: must be one of 1, 2, 3, 4, got 0"):
        fp8_paged_mqa_topk(
            q[0].view(4, 1, 8, 32)[:, :0], torch.zeros(4, 16, 1, 36, dtype=torch.uint8), weights[:0], ends,
            torch.zeros(4, 4, dtype=torch.int32), None, 64, 3,
        )  # fmt: skip


def test_windows_may_be_strided_and_at_the_ends_of_int32() -> None:
    q, kv, weights = operands(3, 20, 8, 32, "fp8", "cpu")
    low, high = -(2**31), 2**31 - 1
    both = torch.tensor([[5, low], [0, low], [low, high]], dtype=torch.int32)
    for longest in (0, 20):
        chosen = fp8_mqa_topk(q[0], kv, weights, both[:, 0], both[:, 1], 20, longest)
        assert (chosen >= 0).sum(1).tolist() == [0, 0, 20]


def test_lengths_at_the_ends_of_int32_and_a_cache_without_pages() -> None:
    q, _, weights = operands(6, 1, 8, 32, "fp8", "cpu")
    cache, table = torch.zeros(2, 16, 1, 36, dtype=torch.uint8), torch.zeros(3, 2, dtype=torch.int32)
    lengths = torch.tensor([-(2**31), 3, 2**31 - 1], dtype=torch.int32)
    given = q[0].view(3, 2, 8, 32)
    chosen = fp8_paged_mqa_topk(given, cache, weights, lengths, table, None, 32, 40)
    assert (chosen >= 0).sum(1).tolist() == [0, 0, 2, 3, 32, 32]
    assert bool((fp8_paged_mqa_topk(given, cache[:0], weights, lengths, table, None, 32, 40) == -1).all())


@pytest.mark.gpu
@pytest.mark.parametrize("format", ["fp8", "mxfp4"])
def test_parts_choose_what_all_logits_choose_on_the_gpu(format: str) -> None:
    check_dense(300, 9001, 64, format, 2048, [7 * 9024 * 4, 128 * 9024 * 4, 1 << 30], "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("format", ["fp8", "mxfp4"])
@pytest.mark.parametrize("next_n", [1, 2, 4])
def test_paged_parts_choose_what_all_logits_choose_on_the_gpu(next_n: int, format: str) -> None:
    check_paged(37, next_n, 64, format, 256, [384 * 4 * next_n * 5, 1 << 30], "cuda")


@pytest.mark.gpu
def test_a_budget_bounds_the_memory_and_changes_nothing() -> None:
    rows, keys, k = 1024, 65536, 2048
    q, kv, weights = operands(rows, keys, 64, 128, "fp8", "cuda")
    ends = torch.arange(1, rows + 1, dtype=torch.int32, device="cuda") * (keys // rows)
    arguments = (q[0], kv, weights, torch.zeros_like(ends), ends, k)
    expected = fp8_mqa_topk(*arguments, deterministic=True)
    out = torch.empty_like(expected)
    budget = 32 << 20
    fp8_mqa_topk(*arguments, max_logits_bytes=budget, deterministic=True, out=out)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out.fill_(-9)
    fp8_mqa_topk(*arguments, max_logits_bytes=budget, deterministic=True, out=out)
    assert torch.cuda.max_memory_allocated() - before <= 1.1 * budget
    assert torch.equal(out, expected)
