"""The indexer's scores and choice in PyTorch: windows, ties, budgets, gradients of chosen scores; Indexer alone."""

from __future__ import annotations

import pytest
import torch
from helpers_attention import HIDDEN, TOP_K, config_of, layer_of
from torch import Tensor

from megamoe.config import IndexerConfig
from megamoe.errors import ConfigError
from megamoe.kernels.index_scores import best_of_window, index_scores, scores_at, select_keys
from megamoe.kernels.rope import rope_tables
from megamoe.layers.indexer import Indexer
from megamoe.layers.indexer_attention import rope_of
from megamoe.testing.attention_oracle import index_score_oracle


def by_sort(scores: Tensor, start: int, end: int, top_k: int) -> list[int]:
    """Sort (score descending, column ascending), NaN last."""
    order = sorted(range(start, end), key=lambda t: torch.inf if scores[t].isnan() else -float(scores[t]))
    return sorted(order[:top_k])


def test_scores_against_float64() -> None:
    q, k, weights = torch.randn(7, 5, 12), torch.randn(11, 12), torch.randn(7, 5)
    truth = index_score_oracle(q.double(), k.double(), weights.double())
    torch.testing.assert_close(index_scores(q, k, weights).double(), truth, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("columns", [1, 4, 5, 6, 40])
def test_windows_ties_and_odd_values(columns: int) -> None:
    torch.manual_seed(0)
    rows = 60
    scores = torch.randint(-2, 3, (rows, columns)).float()  # many ties
    scores[7] = torch.nan
    scores[8, ::2] = torch.nan
    scores[9] = -torch.inf
    scores[10, -1] = torch.inf
    starts = torch.randint(0, columns + 1, (rows,))
    ends = starts + (torch.rand(rows) * (columns - starts + 1)).long()
    kept = best_of_window(scores.clone(), starts, ends, 5)
    assert kept.shape == (rows, 5) and kept.dtype == torch.int32
    for row in range(rows):
        expected = by_sort(scores[row], int(starts[row]), int(ends[row]), 5)
        assert kept[row].tolist() == expected + [-1] * (5 - len(expected)), row


def test_the_budget_does_not_show() -> None:
    q, k, weights = torch.randn(33, 4, 8), torch.randn(70, 8), torch.randn(33, 4)
    ends = torch.arange(33) + 37
    starts = ends - 30
    segments = [(0, 10, 0, 50), (10, 33, 10, 70)]
    expected = select_keys(q, k, weights, starts, ends, 6)
    for budget in (1, 4000, 1 << 30):
        for parts in (None, segments):
            kept = select_keys(q, k, weights, starts, ends, 6, segments=parts, max_logits_bytes=budget)
            assert torch.equal(kept, expected)


@pytest.mark.parametrize("budget", [1, 1 << 20])
def test_chosen_scores_and_their_gradients(budget: int) -> None:
    q, k, weights = (torch.randn(*shape).requires_grad_() for shape in ((6, 3, 8), (9, 8), (6, 3)))
    index = torch.stack([torch.randperm(9)[:4] for _ in range(6)])
    index[0, 1:] = -1
    index[1] = -1
    scores = scores_at(q, k, weights, index, max_gather_bytes=budget)
    exact = [t.detach().double().requires_grad_() for t in (q, k, weights)]
    truth = index_score_oracle(*exact).gather(1, index.clamp(min=0)).masked_fill(index < 0, 0.0)
    torch.testing.assert_close(scores.double(), truth, rtol=1e-5, atol=1e-6)
    pull = torch.randn(6, 4)
    scores.backward(pull)
    truth.backward(pull.double())
    for leaf, known in zip((q, k, weights), exact, strict=True):
        assert leaf.grad is not None and known.grad is not None
        torch.testing.assert_close(leaf.grad.double(), known.grad, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_indexer_alone_chooses_what_the_attention_chooses() -> None:
    config = config_of("glm")
    assert config.attention is not None
    layer, x = layer_of(config), torch.randn(2, 19, HIDDEN)
    mask = torch.ones(2, 19)
    mask[1, :7] = 0
    _, indices = layer(x, attention_mask=mask, return_indices=True)
    indexer = layer.indexer
    assert indexer is not None
    places = mask.cumsum(1).long() - 1
    cos, sin = rope_tables(places, rope_of(config.attention, x.device))
    latent = layer.q_a_layernorm(layer.q_a_proj(x))
    alone = indexer(x, latent, cos, sin, mask)
    assert alone.shape == (2, 19, TOP_K)
    # the attention counts real tokens, the indexer alone counts places
    assert torch.equal(alone[0], indices[0])
    assert torch.equal(alone[1], torch.where(indices[1] < 0, -1, indices[1] + 7))
    # as transformers hands tables over: every angle twice
    assert torch.equal(alone, indexer(x, latent, torch.cat([cos, cos], -1), torch.cat([sin, sin], -1), mask))
    assert indexer(x[:, :3], latent[:, :3], cos[:, :3], sin[:, :3]).shape == (2, 3, 3)


def test_indexer_refuses_a_rope_wider_than_its_head() -> None:
    config = IndexerConfig(heads=2, head_dim=16, top_k=4)
    for rope_dim in (18, 7):
        with pytest.raises(ConfigError, match=r"rope_dim: must be even and in 0\.\.indexer\.head_dim=16"):
            Indexer(config, 8, 8, rope_dim)
