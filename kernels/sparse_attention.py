"""Attention of each query to its own list of rows: latent (absorbed MLA), grouped heads, or one row for all.

A cache row holds what a key and a value are cut out of, so that one gather brings both: MLA's latent and turned part
(the value is the latent, the key is all of it), a grouped head's key beside its value, DeepSeek-V4's row that is both.

Forward runs as one SM90 kernel where `sparse_attention_sm90.takes` the problem. Otherwise, and backward, nothing of
queries x rows is held either: queries are taken in parts whose gathered rows fit a budget.

Shape letters: N queries, H heads, G row heads (H / G query heads share one), R rows, W row width, K rows per query,
D key width, V value width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megamoe.errors import MegaMoeError
from megamoe.kernels.sparse_attention_sm90 import launch_sparse_attention, takes

__all__ = ["RowCut", "sparse_attention"]

DEFAULT_GATHER_BYTES = 256 << 20


@dataclass(frozen=True)
class RowCut:
    """Where key and value stand in a row.

    Attributes:
        key: first and last (excluded) element of the key.
        value: the same of the value; the two may overlap.
    """

    key: tuple[int, int]
    value: tuple[int, int]


def sparse_attention(
    q: Tensor,
    rows: Tensor,
    index: Tensor,
    cut: RowCut,
    *,
    scale: float,
    sinks: Tensor | None = None,
    max_gather_bytes: int = DEFAULT_GATHER_BYTES,
    with_weights: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return softmax(scale q . key) value over the rows that `index` lists for each query.

    Logits, softmax and gradients of the rows are FP32; weights are rounded to the dtype of the rows before they meet
    the values. A query without rows gets zeros. Gradients reach q, rows and sinks; the one of rows is a sum over
    queries in an order that CUDA does not fix, unless `torch.use_deterministic_algorithms(True)` is set.

    Args:
        q: `[N, H, D]`, the dtype of rows.
        rows: `[R, G, W]`; H a multiple of G.
        index: `[N, K]` int32 or int64; below 0 = no row. A row that stands twice counts twice.
        cut: where key (of width D) and value (V) stand in a row.
        scale: factor on the dot products.
        sinks: `[H]`: a logit per head that takes part in the softmax and brings no value, or None.
        max_gather_bytes: bound of the rows gathered at a time; at least one query is taken.
        with_weights: also return the weights.

    Returns:
        `[N, H, V]` in the dtype of q; and `[N, K]` FP32, detached: softmax weights summed over heads, or None.

    Raises:
        ValueError: shapes or dtypes that do not fit.
        MegaMoeError: from the backward pass, if a graph of it is asked for: there is no second derivative.
    """
    _check(q, rows, index, cut, sinks)
    with torch.autocast(q.device.type, enabled=False):  # what is FP32 here stays so
        out, weights = _SparseAttention.apply(q, rows, index, sinks, cut, scale, max_gather_bytes, with_weights)
    return out, weights


def _check(q: Tensor, rows: Tensor, index: Tensor, cut: RowCut, sinks: Tensor | None) -> None:
    if rows.dim() != 3 or q.dim() != 3 or q.shape[1] % rows.shape[1]:
        raise ValueError(f"q, rows: must be [N, H, D] and [R, G, W], H a multiple of G, got {_shapes(q, rows)}")
    if q.shape[2] != cut.key[1] - cut.key[0] or max(cut.key[1], cut.value[1]) > rows.shape[2]:
        raise ValueError(f"cut: {cut} does not fit q and rows of shapes {_shapes(q, rows)}")
    if q.dtype != rows.dtype:
        raise ValueError(f"q, rows: must have one dtype, got {q.dtype} and {rows.dtype}")
    if index.dim() != 2 or index.shape[0] != q.shape[0] or index.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"index: must be int32 or int64 [{q.shape[0]}, K], got {index.dtype} {list(index.shape)}")
    if sinks is not None and sinks.shape != q.shape[1:2]:
        raise ValueError(f"sinks: must be [{q.shape[1]}], got {list(sinks.shape)}")


def _shapes(*tensors: Tensor) -> str:
    return " and ".join(str(list(t.shape)) for t in tensors)


def _bmm(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b in FP32, with FP32 sums."""
    if a.is_cuda and a.dtype != torch.float32:
        return torch.bmm(a, b, out_dtype=torch.float32)
    return torch.bmm(a.float(), b.float())


class _Part:
    """One part of the queries: its rows, gathered, and its weights."""

    def __init__(self, q: Tensor, rows: Tensor, index: Tensor, sinks: Tensor | None, cut: RowCut, scale: float) -> None:
        n, heads, _ = q.shape
        groups = rows.shape[1]
        self.n, self.groups, self.per_group, self.count = n, groups, heads // groups, index.shape[1]
        self.valid = index >= 0
        # Weight 0 times NaN is NaN, so nobody else's row stands in for one that is not there. A query without any has
        # to take row 0, and what comes of that is overwritten.
        self.empty = ~self.valid.any(1)
        index = torch.where(self.valid, index, index.amax(1, keepdim=True).clamp(min=0)) if self.count else index
        # row head g of row r is row r * G + g of the flattened rows
        head = torch.arange(groups, device=rows.device, dtype=index.dtype).view(1, groups, 1)
        self.flat_index = (index.unsqueeze(1) * groups + head).flatten()
        gathered = rows.flatten(0, 1).index_select(0, self.flat_index).view(n * groups, self.count, rows.shape[2])
        self.key = gathered[..., cut.key[0] : cut.key[1]]
        self.value = gathered[..., cut.value[0] : cut.value[1]]
        self.q = q.reshape(n * groups, self.per_group, -1)
        bias = torch.zeros(index.shape, dtype=torch.float32, device=q.device).masked_fill_(~self.valid, -torch.inf)
        logits = _bmm(self.q, self.key.transpose(1, 2)).view(n, heads, self.count)
        torch.add(bias.unsqueeze(1), logits, alpha=scale, out=logits)  # scale and mask in one pass
        self.sink_weight = None
        if sinks is None:
            weights = torch.softmax(logits, -1)
        else:
            sink = sinks.float().view(1, heads, 1)
            top = torch.maximum(logits.amax(-1, keepdim=True), sink) if self.count else sink.expand(n, heads, 1)
            weights = logits.sub_(top).exp_()
            sink_weight = (sink - top).exp()
            total = weights.sum(-1, keepdim=True).add_(sink_weight)
            weights.div_(total)
            self.sink_weight = (sink_weight / total).squeeze(-1)
        self.weights = weights

    def clear_empty(self) -> None:
        """Set the weights of queries without rows to 0; until then they may be NaN."""
        self.weights.masked_fill_(self.empty[:, None, None], 0.0)
        if self.sink_weight is not None:
            self.sink_weight.masked_fill_(self.empty[:, None], 1.0)

    def grouped(self, per_head: Tensor) -> Tensor:
        """View `[n, H, x]` as `[n * G, H / G, x]`."""
        return per_head.reshape(self.n * self.groups, self.per_group, -1)


class _SparseAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        rows: Tensor,
        index: Tensor,
        sinks: Tensor | None,
        cut: RowCut,
        scale: float,
        max_gather_bytes: int,
        with_weights: bool,
    ) -> tuple[Tensor, Tensor | None]:
        ctx.save_for_backward(q, rows, index, sinks)
        per_query = max(1, index.shape[1] * rows.shape[1] * rows.shape[2] * rows.element_size())
        ctx.step = max(1, max_gather_bytes // per_query)
        ctx.cut, ctx.scale = cut, scale
        n, heads, _ = q.shape
        out = q.new_empty(n, heads, cut.value[1] - cut.value[0])
        if not with_weights and takes(q, rows, cut.key, cut.value):
            launch_sparse_attention(q, rows, index, scale, sinks, out)
            return out, None
        weights = q.new_empty(n, index.shape[1], dtype=torch.float32) if with_weights else None
        for first in range(0, n, ctx.step):
            at = slice(first, first + ctx.step)
            part = _Part(q[at], rows, index[at], sinks, cut, scale)
            values = _bmm(part.grouped(part.weights).to(rows.dtype), part.value).view(part.n, heads, -1)
            out[at] = values.masked_fill_(part.empty[:, None, None], 0.0)
            if weights is not None:
                part.clear_empty()
                weights[at] = part.weights.sum(1)
        if weights is not None:
            ctx.mark_non_differentiable(weights)
        return out, weights

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # create_graph
            raise MegaMoeError("sparse attention has no second derivative; take its gradient without create_graph")
        with torch.autocast(grad_out.device.type, enabled=False):
            return _SparseAttention._gradients(ctx, grad_out)

    @staticmethod
    def _gradients(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, rows, index, sinks = ctx.saved_tensors
        cut = ctx.cut
        grad_q = torch.empty_like(q)
        grad_rows = torch.zeros(rows.shape, dtype=torch.float32, device=rows.device).flatten(0, 1)
        grad_sinks = None if sinks is None else torch.zeros(sinks.shape, dtype=torch.float32, device=rows.device)
        for first in range(0, q.shape[0], ctx.step):
            at = slice(first, first + ctx.step)
            part = _Part(q[at], rows, index[at], sinks, cut, ctx.scale)
            part.clear_empty()
            grad = part.grouped(grad_out[at])
            weights = part.grouped(part.weights)
            to_weights = _bmm(grad, part.value.transpose(1, 2)).view(part.n, -1, part.count)
            to_weights = part.grouped(to_weights.masked_fill_(~part.valid.unsqueeze(1), 0.0))
            # the sink has no value, so it takes its share of the mean and nothing else
            mean = (to_weights * weights).sum(-1, keepdim=True)
            to_logits = (weights * (to_weights - mean)).to(rows.dtype)
            if part.sink_weight is not None and grad_sinks is not None:
                grad_sinks -= (part.sink_weight * mean.view(part.n, -1)).sum(0)
            to_q = _bmm(to_logits, part.key).mul_(ctx.scale).view_as(grad_q[at])
            grad_q[at] = to_q.masked_fill_(part.empty[:, None, None], 0.0)
            to_rows = torch.zeros(*part.key.shape[:2], rows.shape[2], dtype=torch.float32, device=rows.device)
            to_rows[..., cut.value[0] : cut.value[1]] += _bmm(weights.to(rows.dtype).transpose(1, 2), grad)
            to_rows[..., cut.key[0] : cut.key[1]] += _bmm(to_logits.transpose(1, 2), part.q).mul_(ctx.scale)
            to_rows.view(part.n, part.groups, part.count, -1).masked_fill_(~part.valid[:, None, :, None], 0.0)
            grad_rows.index_add_(0, part.flat_index, to_rows.flatten(0, 1))
        grads = (
            grad_q if ctx.needs_input_grad[0] else None,
            grad_rows.view(rows.shape).to(rows.dtype) if ctx.needs_input_grad[1] else None,
            None,
            None if grad_sinks is None or sinks is None else grad_sinks.to(sinks.dtype),
        )
        return *grads, None, None, None, None
