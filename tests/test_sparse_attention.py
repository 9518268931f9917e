"""Sparse attention over listed rows: forward and backward against autograd of a dense float64 form."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megamoe.errors import MegaMoeError
from megamoe.kernels.sparse_attention import RowCut, sparse_attention

N, H, R, K = 9, 4, 14, 6
# row heads, row width, cut: MLA (the value is a part of the key), grouped heads, one row that is both
CUTS = {"latent": (1, 10, RowCut((0, 10), (0, 7))), "grouped": (2, 11, RowCut((0, 6), (6, 11))),
        "one row": (1, 8, RowCut((0, 8), (0, 8)))}  # fmt: skip


def dense(q: Tensor, rows: Tensor, index: Tensor, cut: RowCut, scale: float, sinks: Tensor | None) -> Tensor:
    """Loop over queries and heads; a row that is listed twice counts twice."""
    out = []
    for n in range(q.shape[0]):
        chosen = rows[index[n][index[n] >= 0].long()]
        for h in range(q.shape[1]):
            row = chosen[:, h * rows.shape[1] // q.shape[1]]
            logits = scale * row[:, cut.key[0] : cut.key[1]] @ q[n, h]
            if sinks is not None:
                logits = torch.cat([logits, sinks[h : h + 1]])
            weights = torch.softmax(logits, 0)[: row.shape[0]]
            out.append(weights @ row[:, cut.value[0] : cut.value[1]])
    return torch.stack(out).view(q.shape[0], q.shape[1], -1)


def case(
    name: str, sinks: bool, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor, RowCut, Tensor | None]:
    torch.manual_seed(3)
    groups, width, cut = CUTS[name]
    index = torch.stack([torch.randperm(R)[:K] for _ in range(N)]).int()
    index[0, 2:] = -1
    index[1, ::2] = -1
    index[2] = -1
    index[3, 1] = index[3, 0]
    q = torch.randn(N, H, cut.key[1] - cut.key[0])
    rows = torch.randn(R, groups, width)
    return q.to(dtype), rows.to(dtype), index, cut, torch.randn(H) if sinks else None


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("name", sorted(CUTS))
@pytest.mark.parametrize("budget", [1, 1 << 20])
def test_forward_and_backward(name: str, sinks: bool, budget: int) -> None:
    q, rows, index, cut, sink = case(name, sinks)
    leaves = [t.requires_grad_() for t in (q, rows, sink) if t is not None]
    out, weights = sparse_attention(
        q, rows, index, cut, scale=0.4, sinks=sink, max_gather_bytes=budget, with_weights=True
    )
    exact = [t.detach().double().requires_grad_() for t in leaves]
    expected = dense(exact[0], exact[1], index, cut, 0.4, exact[2] if sinks else None)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-6)
    pull = torch.randn_like(out)
    out.backward(pull)
    expected.backward(pull.double())
    for leaf, truth in zip(leaves, exact, strict=True):
        assert leaf.grad is not None and truth.grad is not None
        torch.testing.assert_close(leaf.grad.double(), truth.grad, rtol=1e-4, atol=1e-5)
    assert weights is not None and not weights.requires_grad
    assert (weights[index < 0] == 0).all() and (out[2] == 0).all()
    full = torch.tensor([n for n in range(N) if n != 2])
    total = weights.sum(1)[full]
    assert (total < H).all() if sinks else torch.allclose(total, torch.full_like(total, H))


@pytest.mark.parametrize("sinks", [False, True])
def test_rows_that_nobody_lists_are_not_looked_at(sinks: bool) -> None:
    q, rows, index, cut, sink = case("latent", sinks)
    # row 0 stands in where a query has no row at all
    index[index == 0] = 1
    index[index == R - 1] = 2
    expected = sparse_attention(q, rows, index, cut, scale=0.4, sinks=sink)[0]
    rows[0], rows[R - 1] = torch.nan, torch.inf
    q.requires_grad_(), rows.requires_grad_()
    if sink is not None:
        sink.requires_grad_()
    out = sparse_attention(q, rows, index, cut, scale=0.4, sinks=sink)[0]
    assert torch.equal(out, expected)
    out.sum().backward()
    for leaf in (q, rows, sink):
        assert leaf is None or (leaf.grad is not None and leaf.grad.isfinite().all())
    assert rows.grad is not None and (rows.grad[[0, R - 1]] == 0).all()


def test_bf16_gradients_of_a_row_that_all_list_are_summed_in_fp32() -> None:
    torch.manual_seed(0)
    queries = 2048
    q = torch.randn(queries, 1, 8).bfloat16()
    rows = torch.randn(3, 1, 8).bfloat16().requires_grad_()
    index = torch.tensor([[0, 1, 2]]).expand(queries, 3)
    cut = RowCut((0, 8), (0, 8))
    sparse_attention(q, rows, index, cut, scale=0.3)[0].sum().backward()
    exact = rows.detach().double().requires_grad_()
    weights = torch.softmax(0.3 * torch.einsum("nhd,tgd->nht", q.double(), exact), -1)
    torch.einsum("nht,tgd->nhd", weights, exact).sum().backward()
    assert rows.grad is not None and exact.grad is not None
    error = (rows.grad.double() - exact.grad).norm() / exact.grad.norm()
    assert error < 2**-8, error  # a BF16 sum would stop growing at 256 terms


def test_no_rows_and_no_queries() -> None:
    cut = RowCut((0, 4), (0, 4))
    q, rows = torch.randn(3, 2, 4), torch.randn(5, 1, 4)
    empty = torch.empty(3, 0, dtype=torch.int32)
    assert (sparse_attention(q, rows, empty, cut, scale=1.0)[0] == 0).all()
    assert sparse_attention(q[:0], rows, empty[:0], cut, scale=1.0)[0].shape == (0, 2, 4)


def test_refusals() -> None:
    q, rows, index, cut, _ = case("grouped", False)
    for wrong, match in (
        (lambda: sparse_attention(q[:, :3], rows, index, cut, scale=1.0), "H a multiple of G"),
        (lambda: sparse_attention(q[..., :5], rows, index, cut, scale=1.0), "cut: "),
        (lambda: sparse_attention(q.bfloat16(), rows, index, cut, scale=1.0), "must have one dtype"),
        (lambda: sparse_attention(q, rows, index[:4], cut, scale=1.0), r"index: must be int32 or int64 \[9, K\]"),
        (lambda: sparse_attention(q, rows, index.float(), cut, scale=1.0), "index: must be int32 or int64"),
        (lambda: sparse_attention(q, rows, index, cut, scale=1.0, sinks=torch.zeros(3)), r"sinks: must be \[4\]"),
    ):
        with pytest.raises(ValueError, match=match):
            wrong()


def test_autocast_changes_nothing() -> None:
    results = []
    for enabled in (False, True):
        q, rows, index, cut, sinks = case("grouped", True)
        q, rows = q.detach().requires_grad_(), rows.detach().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            out, _ = sparse_attention(q, rows, index, cut, scale=1.0, sinks=sinks)
            out.square().sum().backward()
        results.append((out.detach(), q.grad, rows.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_second_derivative_is_refused() -> None:
    q, rows, index, cut, _ = case("grouped", False)
    q = q.detach().requires_grad_()
    out, _ = sparse_attention(q, rows, index, cut, scale=1.0)
    with pytest.raises(MegaMoeError, match="no second derivative"):
        torch.autograd.grad(out.square().sum(), q, create_graph=True)
