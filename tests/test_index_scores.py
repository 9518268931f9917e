"""The indexer's scores and choice in PyTorch: windows, ties, budgets, gradients of chosen scores; Indexer alone."""

from __future__ import annotations

import pytest
import torch
from helpers_attention import HIDDEN, TOP_K, config_of, layer_of

from megamoe.config import IndexerConfig
from megamoe.errors import ConfigError
from megamoe.kernels.index_rows import IndexRows, decode_rows, encode_rows, pool_of_rows, read_rows, write_rows
from megamoe.kernels.index_scores import index_scores, scores_at, select_keys
from megamoe.kernels.indexer_quantize import hadamard_transform
from megamoe.kernels.mqa_logits import fp8_mqa_logits
from megamoe.kernels.rope import rope_tables
from megamoe.layers.indexer import Indexer
from megamoe.layers.indexer_attention import rope_of
from megamoe.testing.attention_oracle import index_score_oracle


def test_scores_against_float64() -> None:
    q, k, weights = torch.randn(7, 5, 12), torch.randn(11, 12), torch.randn(7, 5)
    truth = index_score_oracle(q.double(), k.double(), weights.double())
    torch.testing.assert_close(index_scores(q, k, weights).double(), truth, rtol=1e-5, atol=1e-5)


def test_the_budget_does_not_show() -> None:
    q, k, weights = torch.randn(33, 4, 8), torch.randn(70, 8), torch.randn(33, 4)
    ends = torch.arange(33, dtype=torch.int32) + 37
    starts = ends - 30
    ends[4], starts[5] = starts[4], ends[5] - 3  # an empty window, and one of 3
    segments = [(0, 10, 0, 50), (10, 33, 10, 70)]
    scores = index_scores(q, k, weights)
    expected = []
    for row in range(33):
        window = scores[row, starts[row] : ends[row]]
        best = sorted(window.sort(descending=True, stable=True).indices[:6].tolist())
        expected.append(best + [-1] * (6 - len(best)))
    for budget in (1, 4000, 1 << 30):
        for parts in (None, segments):
            rows = IndexRows(q, None), IndexRows(k, None)
            kept = select_keys(*rows, weights, starts, ends, 6, segments=parts, max_logits_bytes=budget)
            assert kept.tolist() == expected


@pytest.mark.parametrize("hadamard", [False, True])
@pytest.mark.parametrize("format", ["none", "fp8", "mxfp4"])
def test_rows_in_a_format_survive_the_cache(format: str, hadamard: bool) -> None:
    x = torch.randn(9, 64)
    rows = encode_rows(x, format, hadamard=hadamard)
    width, dtype = pool_of_rows(format, 64, torch.float32)
    pool = torch.zeros(4, 5, width, dtype=dtype)
    slots = torch.randperm(20)[:9]
    write_rows(pool, slots, x, format, hadamard=hadamard)
    back = read_rows(pool, slots, format)
    for made, read in zip(rows, back, strict=True):
        assert (made is None and read is None) or torch.equal(made.view(torch.uint8), read.view(torch.uint8))
    truth = hadamard_transform(x) if hadamard else x
    error = (decode_rows(rows) - truth).norm() / truth.norm()
    # rounding to 3 or 1 bits of mantissa
    assert error < {"none": 1e-6, "fp8": 0.04, "mxfp4": 0.2}[format], error


@pytest.mark.parametrize("format", ["fp8", "mxfp4"])
def test_rows_of_fp16_are_encoded_as_those_of_fp32(format: str) -> None:
    x = torch.randn(9, 64).half()
    for half, wide in zip(*(encode_rows(t, format, hadamard=True) for t in (x, x.float())), strict=True):
        assert torch.equal(half.view(torch.uint8), wide.view(torch.uint8))
    width, dtype = pool_of_rows(format, 64, torch.float16)
    pools = [torch.zeros(3, 16, width, dtype=dtype) for _ in range(2)]
    for pool, rows in zip(pools, (x, x.float()), strict=True):
        write_rows(pool, torch.arange(9), rows, format, hadamard=False)
    assert torch.equal(*pools) and bool(pools[0].any())


def test_scores_do_not_see_autocast() -> None:
    q, k, weights = torch.randn(6, 8, 32), torch.randn(9, 32), torch.randn(6, 8)
    index = torch.randint(0, 9, (6, 4))
    windows = torch.zeros(6, dtype=torch.int32), torch.full((6,), 9, dtype=torch.int32)
    results = []
    for enabled in (False, True):
        leaves = [t.clone().requires_grad_() for t in (q, k, weights)]
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            scores = scores_at(*leaves, index)
            scores.square().sum().backward()
            e4m3 = q.to(torch.float8_e4m3fn), (k.to(torch.float8_e4m3fn), torch.ones(9))
            logits = fp8_mqa_logits(*e4m3, weights, *windows)
            results.append((index_scores(q, k, weights), scores.detach(), logits, *(leaf.grad for leaf in leaves)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


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
    known = torch.autograd.grad((truth * pull).sum(), exact, create_graph=True)
    found = torch.autograd.grad((scores * pull).sum(), (q, k, weights), create_graph=True)
    # a second derivative, too
    sum(grad.square().sum() for grad in found).backward(retain_graph=True)  # type: ignore[union-attr]
    sum(grad.square().sum() for grad in known).backward(retain_graph=True)  # type: ignore[union-attr]
    for leaf, true in zip((q, k, weights), exact, strict=True):
        assert leaf.grad is not None and true.grad is not None
        torch.testing.assert_close(leaf.grad.double(), true.grad, rtol=1e-4, atol=1e-4)
        leaf.grad = true.grad = None
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


def test_indexer_refuses_what_would_mix_sequences() -> None:
    indexer = Indexer(IndexerConfig(heads=4, head_dim=16, top_k=4), hidden=24, q_lora=12, rope_dim=8)
    x, latent, cos, sin = torch.randn(2, 9, 24), torch.randn(2, 9, 12), torch.ones(1, 9, 4), torch.zeros(1, 9, 4)
    for changed, match in (
        ({"attention_mask": torch.ones(2, 8)}, r"attention_mask: must be \[2, 9\], got \[2, 8\]"),
        ({"attention_mask": torch.ones(1, 9)}, r"attention_mask: must be \[2, 9\], got \[1, 9\]"),
        ({"q_latent": latent[:, :8]}, r"q_latent: must be \[2, 9, 12\], got \[2, 8, 12\]"),
        ({"q_latent": None}, "q_latent: must be a tensor, got NoneType"),
        ({"hidden_states": x[0]}, r"hidden_states: must be \[B, S, 24\]"),
        ({"cos": cos[:, :5]}, r"cos: must be \[2, 9, 4\]"),
        ({"sin": sin[..., :2]}, r"sin: must be \[2, 9, 4\]"),
    ):
        with pytest.raises(ValueError, match=match):
            indexer(**{"hidden_states": x, "q_latent": latent, "cos": cos, "sin": sin, **changed})
    assert indexer(x[:, :0], latent[:, :0], cos[:, :0], sin[:, :0]).shape == (2, 0, 0)
    assert indexer(x[:0], latent[:0], cos, sin).shape == (0, 9, 4)


def test_indexer_refuses_a_rope_wider_than_its_head() -> None:
    config = IndexerConfig(heads=2, head_dim=16, top_k=4)
    for rope_dim in (18, 7):
        with pytest.raises(ConfigError, match=r"rope_dim: must be even and in 0\.\.indexer\.head_dim=16"):
            Indexer(config, 8, 8, rope_dim)
