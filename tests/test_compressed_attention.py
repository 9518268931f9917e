"""CompressedAttention on the CPU: prefill, decoding, padding, gradients, checkpoints, against the float64 oracle."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from helpers_attention import (
    HIDDEN,
    TOLERANCE,
    TOP_K,
    compressed_layer_of,
    config_of,
    kept_of,
    layer_of,
    parameters_of,
    truth_of,
)
from torch import Tensor

from megamoe.config import MoEConfig
from megamoe.errors import ConfigError, MegaMoeError
from megamoe.kernels import formats
from megamoe.layers.compressed_attention import DEEPSEEK_NAMES, CompressedAttention
from megamoe.layers.indexer_attention import IndexerAttention
from megamoe.testing.attention_oracle import AttentionTruth


def prefilled(batch: int = 2, length: int = 39, **changes: Any) -> tuple[MoEConfig, CompressedAttention, Tensor]:
    config = config_of("deepseek_v4", **changes)
    return config, compressed_layer_of(config), torch.randn(batch, length, HIDDEN)


def check(out: Tensor, indices: Tensor, truth: AttentionTruth) -> None:
    assert kept_of(indices) == truth.kept
    torch.testing.assert_close(out.double(), truth.out, rtol=TOLERANCE, atol=TOLERANCE)


@torch.no_grad()
def test_prefill() -> None:
    config, layer, x = prefilled()
    out, indices = layer(x, return_indices=True)
    assert indices.shape == (2, 39, TOP_K)
    truths = [truth_of(config, parameters_of(layer), x[b]) for b in range(2)]
    for b, truth in enumerate(truths):
        check(out[b], indices[b], truth)
    assert {len(kept) for kept in truths[0].kept} == {0, 1, 2, 3, 4, 5}


@pytest.mark.parametrize(
    "sizes",
    [[1] * 39, [3] + [1] * 36, [5, 1, 1, 9, 8, 1, 14], [38, 1], [2] * 19 + [1], [16, 9, 9, 5]],
    ids=["one by one", "three first", "mixed", "long first", "pairs", "chunks"],
)
@torch.no_grad()
def test_decoding(sizes: list[int]) -> None:
    config, layer, x = prefilled()
    cache = layer.make_cache(2)
    done = [layer(part, cache=cache, return_indices=True) for part in x.split(sizes, 1)]
    out, indices = (torch.cat(pieces, 1) for pieces in zip(*done, strict=True))
    assert cache.host_lengths == [39, 39] and cache.pages.host_lengths == [9, 9, 14, 14]
    for b in range(2):
        check(out[b], indices[b], truth_of(config, parameters_of(layer), x[b]))


@torch.no_grad()
def test_padding_anywhere_and_lengths_that_differ() -> None:
    config, layer, x = prefilled(batch=4, length=21)
    mask = torch.ones(4, 21, dtype=torch.int64)
    mask[0, :6] = 0
    mask[1, 11:] = 0
    mask[2, 4:9] = 0
    mask[3] = 0
    x[mask == 0] = torch.nan
    cache = layer.make_cache(4)
    out, indices = layer(x, attention_mask=mask, cache=cache, return_indices=True)
    assert torch.equal(layer(x, attention_mask=mask), out)
    assert (out[mask == 0] == 0).all() and (indices[mask == 0] == -1).all()
    y = torch.randn(4, 12, HIDDEN)
    late = torch.ones(4, 12)
    late[1, 3:] = 0  # one sequence falls behind while the others go on
    more = []
    for part, here in ((slice(0, 2), late[:, :2]), (slice(2, 11), late[:, :11]), (slice(11, 12), late)):
        step, kept = layer(y[:, part], attention_mask=here, cache=cache, return_indices=True)
        more.append((step, kept))
    step, kept = (torch.cat(pieces, 1) for pieces in zip(*more, strict=True))
    for b in range(4):
        first, second = mask[b] == 1, late[b] == 1
        truth = truth_of(config, parameters_of(layer), torch.cat([x[b, first], y[b, second]]))
        check(torch.cat([out[b, first], step[b, second]]), torch.cat([indices[b, first], kept[b, second]]), truth)


@torch.no_grad()
def test_a_cache_may_be_used_again() -> None:
    config, layer, x = prefilled(length=15)
    cache = layer.make_cache(2)
    layer(torch.randn(2, 30, HIDDEN) * 100, cache=cache)
    cache.reset([0])
    layer(torch.cat([x[:1, :7], torch.full((1, 7, HIDDEN), torch.nan)]), cache=cache,
          attention_mask=torch.tensor([[1] * 7, [0] * 7]))  # fmt: skip
    cache.reset([1])
    half = torch.cat([torch.full((1, 7, HIDDEN), torch.nan), x[1:, :7]])
    layer(half, cache=cache, attention_mask=torch.tensor([[0] * 7, [1] * 7]))
    out = torch.cat([layer(part, cache=cache) for part in x[:, 7:].split(1, 1)], 1)
    for b in range(2):
        truth = truth_of(config, parameters_of(layer), x[b])
        torch.testing.assert_close(out[b].double(), truth.out[7:], rtol=TOLERANCE, atol=TOLERANCE)
    held = cache.num_bytes
    cache.reset()
    layer(x, cache=cache)
    assert cache.num_bytes == held


@pytest.mark.parametrize("changed", [{"rope_theta": 101.0}, {"window": 7}, {"yarn_factor": 1.0}])
@torch.no_grad()
def test_a_wrong_fact_is_seen(changed: dict[str, Any]) -> None:
    config, layer, x = prefilled(batch=1)
    wrong = dataclasses.replace(config, attention=dataclasses.replace(config.attention, **changed))  # type: ignore[type-var]
    assert (layer(x)[0] - truth_of(wrong, parameters_of(layer), x[0]).out).abs().max() > 1e-3


def test_gradients_are_those_of_the_oracle() -> None:
    config, layer, x = prefilled(length=25)
    mask = torch.ones(2, 25)
    mask[1, :4] = 0
    x.requires_grad_()
    pull = torch.randn(2, 25, HIDDEN)
    (layer(x, attention_mask=mask) * pull).sum().backward()
    parameters = {key: value.requires_grad_() for key, value in parameters_of(layer).items()}
    exact = x.detach().double().requires_grad_()
    for b, first in ((0, 0), (1, 4)):
        truth = truth_of(config, parameters, exact[b, first:])
        (truth.out * pull[b, first:]).sum().backward()
    assert x.grad is not None and exact.grad is not None
    torch.testing.assert_close(x.grad.double(), exact.grad, rtol=1e-4, atol=TOLERANCE)
    for key, parameter in layer.named_parameters():
        if "indexer" in key:
            assert parameter.grad is None, key
            continue
        assert parameter.grad is not None and parameters[key].grad is not None, key
        torch.testing.assert_close(parameter.grad.double(), parameters[key].grad, rtol=1e-4, atol=1e-4, msg=key)


@pytest.mark.parametrize("options", [{"quantization": "fp8", "hadamard": True}, {"quantization": "mxfp4"}])
@torch.no_grad()
def test_quantised_indexer(options: dict[str, Any]) -> None:
    config, layer, x = prefilled(batch=1, attention={"page_size": 16}, indexer={"head_dim": 32, "heads": 8, **options})
    out, indices = layer(x, return_indices=True)
    truth = truth_of(config, parameters_of(layer), x[0], kept=kept_of(indices[0]))
    torch.testing.assert_close(out[0].double(), truth.out, rtol=TOLERANCE, atol=TOLERANCE)
    best = truth_of(config, parameters_of(layer), x[0]).kept
    shared = sum(len({*a} & {*b}) for a, b in zip(kept_of(indices[0]), best, strict=True))
    assert shared > (0.9 if options["quantization"] == "fp8" else 0.7) * sum(map(len, best))
    cache = layer.make_cache(1)
    steps = [layer(part, cache=cache) for part in x.split([3, 9] + [1] * 27, 1)]
    torch.testing.assert_close(torch.cat(steps, 1), out, rtol=TOLERANCE, atol=TOLERANCE)


@torch.no_grad()
def test_deepseek_names_and_fp8_matrices_load() -> None:
    config, layer, x = prefilled()
    back = {ours: theirs for theirs, ours in DEEPSEEK_NAMES.items()}
    state: dict[str, Tensor] = {}
    for key, value in layer.state_dict().items():
        name = max((ours for ours in back if key == ours or key.startswith(ours + ".")), key=len, default="")
        theirs = "attn." + (back[name] + key[len(name) :] if name else key)
        if theirs in ("attn.wq_b.weight", "attn.wo_a.weight"):
            codes, scale = formats.quantize_e4m3_weight(value)
            state[theirs.replace(".weight", ".scale")] = scale.log2().ceil().exp2().to(torch.float8_e8m0fnu)
            value = codes
        state[theirs] = value
    assert {"attn.attn_sink", "attn.compressor.ape", "attn.indexer.compressor.norm.weight"} <= state.keys()
    model = torch.nn.Module()
    model.attn = twin = CompressedAttention(config)
    model.load_state_dict(state)
    for key in ("q_b_proj", "o_a_proj"):
        name = back[key]
        scale = state[f"attn.{name}.scale"].float()
        expected = formats.dequantize_e4m3_weight(state[f"attn.{name}.weight"], scale)
        assert torch.equal(twin.get_submodule(key).weight, expected)
        getattr(layer, key).weight.copy_(expected)
    assert torch.equal(twin(x), layer(x))


@torch.no_grad()
def test_parts_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    _, layer, x = prefilled()
    out = layer(x)
    monkeypatch.setattr("megamoe.layers.compressed_attention._PART", 5)
    torch.testing.assert_close(layer(x), out, rtol=1e-6, atol=1e-6)
    assert layer(x[:, :0]).shape == (2, 0, HIDDEN) and layer(x[:0]).shape == (0, 39, HIDDEN)


@pytest.mark.parametrize(
    ("place", "is_torn"),
    [
        ("compressor.Compressor.project", False),
        ("paged_cache.PagedCache.extend", False),
        ("compressed_cache.CompressedCache.remember", True),
        ("compressed_attention.CompressedAttention._choose", True),
        ("compressed_attention.sparse_attention", True),
    ],
)
@torch.no_grad()
def test_a_call_that_ends_early_is_not_hidden(place: str, is_torn: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    _, layer, x = prefilled()
    cache, other = layer.make_cache(2), layer.make_cache(2)
    mask = torch.ones(2, 3)
    mask[1] = 0  # sequence 1 is not touched
    for target in (cache, other):
        layer(x[:, :30], cache=target)

    def stop(*_: object, **__: object) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(f"megamoe.layers.{place}", stop)
    with pytest.raises(KeyboardInterrupt):
        layer(x[:, 30:33], attention_mask=mask, cache=cache)
    if is_torn:
        with pytest.raises(MegaMoeError, match=r"a call ended early when it had changed sequences \[0\].* reset them"):
            layer(x[:, 30:33], cache=cache)
        for target in (cache, other):
            target.reset([0])
            layer(x[:, :30], cache=target, attention_mask=torch.tensor([[1.0], [0.0]]).expand(2, 30))
    assert cache.host_lengths == [30, 30]
    assert torch.equal(layer(x[:, 30:], cache=cache), layer(x[:, 30:], cache=other))


def test_refusals() -> None:
    config, layer, x = prefilled()
    with pytest.raises(ConfigError, match="attention.kind=compressed is CompressedAttention's"):
        IndexerAttention(config)
    with pytest.raises(ConfigError, match="attention.kind=gqa is IndexerAttention's"):
        CompressedAttention(config_of("gqa"))
    with pytest.raises(ValueError, match=r"hidden_states: must be \[B, S, 32\]"):
        layer(x[0])
    with pytest.raises(ValueError, match="cache: must be for the 2 sequences"):
        layer(x, cache=layer.make_cache(1))
    with pytest.raises(ValueError, match=r"topk_indices: must be int32 or int64 \[2, 39, K\]"):
        layer(x, topk_indices=torch.zeros(2, 39, 3))
    cache = layer.make_cache(2)
    with pytest.raises(ValueError, match="token 0 of sequence 0 may keep places below 0, got 0"):
        layer(x, cache=cache, topk_indices=torch.zeros(2, 39, 1, dtype=torch.int32))
    with pytest.raises(ValueError, match="cache: must be for a window of 6 tokens, is for 7"):
        layer(x, cache=compressed_layer_of(config_of("deepseek_v4", attention={"window": 7})).make_cache(2))
    with pytest.raises(ValueError, match="cache: must be a CompressedCache of make_cache, got PagedCache"):
        layer(x, cache=layer_of(config_of("gqa")).make_cache(2))
    with pytest.raises(ValueError, match="sequences: must be at least 1, got -1"):
        layer.make_cache(-1)
    assert cache.host_lengths == [0, 0], "a refused call changes nothing"
    layer(x, cache=cache)
    with pytest.raises(MegaMoeError, match="a gradient is asked for"):
        layer(x, cache=cache)
    with pytest.raises(ValueError, match=r"sequences: must be numbers in 0\.\.1, got 2"):
        cache.reset([0, 2])
    assert cache.host_lengths == [39, 39] and cache.pages.host_lengths == [9, 9, 14, 14]
    assert layer_of(config_of("gqa")).indexer is not None
