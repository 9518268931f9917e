"""The lightning indexer's choice: scores and top-k under a budget; and chosen scores with their gradient.

score of key t for query n = sum over heads h of  weight[n, h] * relu(q[n, h] . k[t]), in FP32.

Each query has a window of keys, and keeps the best of it. Nothing of queries x keys is held: queries are taken in
parts whose scores fit a budget. Quantised rows go through `mqa_topk`, on either device; others through torch.

Shape letters: N queries, H heads, D head width, T keys, K kept keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megamoe.kernels.index_rows import IndexRows
from megamoe.kernels.mqa_instances import MAX_NEXT_N as MAX_PAGED_QUERIES
from megamoe.kernels.mqa_topk import fp8_fp4_mqa_topk, fp8_fp4_paged_mqa_topk
from megamoe.kernels.topk import topk_indices

__all__ = ["MAX_PAGED_QUERIES", "Segment", "index_scores", "scores_at", "select_keys", "select_paged_keys"]

# queries [first, last) meet keys [first, last): what belongs to one sequence
Segment = tuple[int, int, int, int]


def index_scores(q: Tensor, k: Tensor, weights: Tensor) -> Tensor:
    """Return the score of every key for every query: `[N, H, D]`, `[T, D]`, `[N, H]` FP32 -> `[N, T]` FP32.

    Holds `[N, H, T]` FP32.
    """
    n, heads, dim = q.shape
    flat = q.reshape(n * heads, dim)
    with torch.autocast(q.device.type, enabled=False):
        if q.is_cuda and q.dtype == k.dtype != torch.float32:
            products = torch.mm(flat, k.t(), out_dtype=torch.float32)
        else:
            products = flat.float() @ k.float().t()
        products = products.relu_().view(n, heads, -1)
        return torch.bmm(weights.unsqueeze(1), products).squeeze(1)


def select_keys(
    q: IndexRows,
    k: IndexRows,
    weights: Tensor,
    starts: Tensor,
    ends: Tensor,
    top_k: int,
    *,
    segments: Sequence[Segment] | None = None,
    max_logits_bytes: int = 1 << 30,
) -> Tensor:
    """Return the keys that each query keeps, as places in its window.

    Args:
        q: rows `[N, H, D]`; k: rows `[T, D]`, of one format.
        weights: `[N, H]` FP32.
        starts, ends: `[N]` int32: the window of each query, as rows of k.
        top_k: keys to keep.
        segments: which queries meet which keys; a window lies in the keys of its query's segment. None = all meet all.
        max_logits_bytes: bound of the scores held at a time, and without quantisation of the products that they are
            sums of; at least one query is taken.

    Returns:
        `[N, top_k]` int32, counted from the start of each window, ascending, -1 behind where the window has fewer. Of
        equal scores the lower place is kept; NaN is the highest.
    """
    count, heads = weights.shape
    out = torch.full((count, top_k), -1, dtype=torch.int32, device=weights.device)
    for first, last, key_first, key_last in segments or [(0, count, 0, k.values.shape[0])]:
        some = slice(first, last)
        part = (
            q.part(some), k.part(slice(key_first, key_last)), weights[some],
            starts[some] - key_first, ends[some] - key_first, out[some], max_logits_bytes,
        )  # fmt: skip
        if k.scales is None:
            _select_by_torch(*part)
        else:
            _select_quantised(*part)
    return out


def _select_by_torch(
    q: IndexRows, k: IndexRows, weights: Tensor, starts: Tensor, ends: Tensor, out: Tensor, max_logits_bytes: int
) -> None:
    step = max(1, max_logits_bytes // max(1, 4 * weights.shape[1] * k.values.shape[0]))
    for first in range(0, weights.shape[0], step):
        at = slice(first, first + step)
        # where reading them costs nothing, windows that end early need fewer keys
        behind = k.values.shape[0] if ends.is_cuda else int(ends[at].max())
        scores = index_scores(q.values[at], k.values[:behind], weights[at])
        topk_indices(scores, out.shape[1], starts[at], ends[at], deterministic=True, shifts=-starts[at], out=out[at])


def _select_quantised(
    q: IndexRows, k: IndexRows, weights: Tensor, starts: Tensor, ends: Tensor, out: Tensor, max_logits_bytes: int
) -> None:
    assert k.scales is not None
    budget = max(max_logits_bytes, _row_bytes(k.values.shape[0]))
    queries, weights = _operands(q, weights)
    given = (k.values, k.scales), weights, starts, ends, out.shape[1]
    fp8_fp4_mqa_topk(queries, *given, max_logits_bytes=budget, deterministic=True, out=out)
    out.copy_(torch.where(out < 0, out, out - starts.unsqueeze(1)))


def select_paged_keys(
    q: IndexRows,
    pool: Tensor,
    weights: Tensor,
    lengths: Tensor,
    block_table: Tensor,
    top_k: int,
    *,
    max_length: int,
    max_logits_bytes: int = 1 << 30,
) -> Tensor:
    """Return the keys that each query keeps of a paged cache, of a quantised format.

    Args:
        q: rows `[B, n, H, D]`, n at most `MAX_PAGED_QUERIES`.
        pool: uint8 `[pages, page, width]`, see `index_rows.pool_of_rows`.
        weights: `[B * n, H]` FP32.
        lengths: `[B, n]` int32: keys of the sequence that each query sees.
        block_table: `[B, columns]` int32: pages of each sequence.
        top_k: keys to keep.
        max_length: no length is larger.
        max_logits_bytes: bound of the scores held at a time; at least one sequence is taken.

    Returns:
        `[B * n, top_k]` int32: places in the sequence, as of `select_keys`.
    """
    batch, queries = lengths.shape
    if not max_length:
        return torch.full((batch * queries, top_k), -1, dtype=torch.int32, device=weights.device)
    values, weights = _operands(q, weights)
    budget = max(max_logits_bytes, queries * _row_bytes(max_length))
    given = pool.unsqueeze(2), weights, lengths.contiguous(), block_table, None, max_length, top_k
    return fp8_fp4_paged_mqa_topk(values, *given, max_logits_bytes=budget, deterministic=True)


def _operands(q: IndexRows, weights: Tensor) -> tuple[tuple[Tensor, Tensor | None], Tensor]:
    """Return queries and weights as `mqa_topk` takes them: the FP32 scale of a query belongs into its head's weight."""
    assert q.scales is not None, "a quantised format"
    if q.values.dtype == torch.float8_e4m3fn:
        return (q.values, None), weights * q.scales.view(weights.shape)
    return (q.values, q.scales), weights


def _row_bytes(columns: int) -> int:
    """Return an upper bound of the bytes of a row of logits, of which a budget holds at least one."""
    return 4 * (columns + 32)


def scores_at(q: Tensor, k: Tensor, weights: Tensor, index: Tensor, *, max_gather_bytes: int = 256 << 20) -> Tensor:
    """Return the scores of listed keys, differentiable: `[N, K]` FP32, 0 at an index below 0.

    Args:
        q: `[N, H, D]`; k: `[T, D]`; weights: `[N, H]` FP32.
        index: `[N, K]` int32 or int64 rows of k.
        max_gather_bytes: bound of the keys gathered at a time.
    """
    result: Tensor = _ScoresAt.apply(q, k, weights, index, max_gather_bytes)
    return result


class _ScoresAt(torch.autograd.Function):
    @staticmethod
    def _products(q: Tensor, k: Tensor, index: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return (valid [n, K], row numbers, gathered keys [n, K, D], q . k [n, H, K])."""
        valid = index >= 0
        rows = torch.where(valid, index, index.amax(1, keepdim=True).clamp(min=0)).flatten()
        keys = k.index_select(0, rows).float().view(*index.shape, -1)
        products = torch.bmm(q.float(), keys.transpose(1, 2)).masked_fill_(~valid.unsqueeze(1), 0.0)
        return valid, rows, keys, products

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, weights: Tensor, index: Tensor, max_gather_bytes: int) -> Tensor:
        ctx.save_for_backward(q, k, weights, index)
        ctx.step = max(1, max_gather_bytes // max(1, 4 * index.shape[1] * (k.shape[1] + q.shape[1])))
        out = q.new_empty(index.shape, dtype=torch.float32)
        with torch.autocast(q.device.type, enabled=False):
            for first in range(0, q.shape[0], ctx.step):
                at = slice(first, first + ctx.step)
                products = _ScoresAt._products(q[at], k, index[at])[3]
                out[at] = torch.bmm(weights[at].float().unsqueeze(1), products.relu_()).squeeze(1)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        with torch.autocast(grad.device.type, enabled=False):
            return _ScoresAt._gradients(ctx, grad)

    @staticmethod
    def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, weights, index = ctx.saved_tensors
        grad_q, grad_weights = torch.empty_like(q), torch.empty_like(weights)
        grad_k = torch.zeros(k.shape, dtype=torch.float32, device=k.device)
        for first in range(0, q.shape[0], ctx.step):
            at = slice(first, first + ctx.step)
            valid, rows, keys, products = _ScoresAt._products(q[at], k, index[at])
            to_scores = grad[at].masked_fill(~valid, 0.0)
            grad_weights[at] = torch.bmm(products.relu(), to_scores.unsqueeze(2)).squeeze(2)
            to_products = (products > 0) * weights[at].float().unsqueeze(2) * to_scores.unsqueeze(1)
            grad_q[at] = torch.bmm(to_products, keys.masked_fill(~valid.unsqueeze(2), 0.0))
            grad_k.index_add_(0, rows, torch.bmm(to_products.transpose(1, 2), q[at].float()).flatten(0, 1))
        return grad_q, grad_k.to(k.dtype), grad_weights, None, None
