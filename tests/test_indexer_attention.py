"""IndexerAttention on the CPU: prefill, decoding, padding, gradients, checkpoints, against the float64 oracle."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from helpers_attention import HIDDEN, KINDS, TOLERANCE, TOP_K, config_of, kept_of, layer_of, parameters_of, truth_of
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megamoe.config import MoEConfig
from megamoe.errors import ConfigError, MegaMoeError
from megamoe.kernels import formats
from megamoe.layers.attention import make_attention
from megamoe.layers.indexer_attention import DEEPSEEK_NAMES, IndexerAttention
from megamoe.testing.attention_oracle import AttentionTruth

FP8: dict[str, Any] = {
    "indexer": {"quantization": "fp8", "heads": 8, "head_dim": 32},
    "attention": {"page_size": 16},
}
kinds = pytest.mark.parametrize("name", sorted(KINDS))


def prefilled(
    name: str, batch: int = 2, length: int = 23, **changes: Any
) -> tuple[MoEConfig, IndexerAttention, Tensor]:
    config = config_of(name, **changes)
    return config, layer_of(config), torch.randn(batch, length, HIDDEN)


def check(out: Tensor, indices: Tensor, truth: AttentionTruth) -> None:
    assert kept_of(indices) == truth.kept
    torch.testing.assert_close(out.double(), truth.out, rtol=TOLERANCE, atol=TOLERANCE)


@kinds
@torch.no_grad()
def test_prefill(name: str) -> None:
    config, layer, x = prefilled(name)
    out, indices = layer(x, return_indices=True)
    assert indices.shape == (2, 23, TOP_K) and indices.dtype == torch.int32
    for b in range(2):
        check(out[b], indices[b], truth_of(config, parameters_of(layer), x[b]))


@kinds
@torch.no_grad()
def test_decoding_step_by_step_and_in_chunks(name: str) -> None:
    config, layer, x = prefilled(name)
    cache = layer.make_cache(2)
    parts = [x[:, :3], *x[:, 3:12].split(1, 1), x[:, 12:13], x[:, 13:19], *x[:, 19:].split(2, 1)]
    done = [layer(part, cache=cache, return_indices=True) for part in parts]
    out, indices = (torch.cat(pieces, 1) for pieces in zip(*done, strict=True))
    assert cache.host_lengths == [23, 23]
    for b in range(2):
        check(out[b], indices[b], truth_of(config, parameters_of(layer), x[b]))


@kinds
@torch.no_grad()
def test_padding_on_either_side_and_between(name: str) -> None:
    config, layer, x = prefilled(name, batch=4, length=17)
    mask = torch.ones(4, 17, dtype=torch.int64)
    mask[0, :6] = 0
    mask[1, 11:] = 0
    mask[2, 4:9] = 0
    x[mask == 0] = torch.nan  # nobody may look at it
    out, indices = layer(x, attention_mask=mask, return_indices=True)
    assert (out[mask == 0] == 0).all() and (indices[mask == 0] == -1).all()
    for b in range(4):
        real = mask[b] == 1
        check(out[b, real], indices[b, real], truth_of(config, parameters_of(layer), x[b, real]))
    alone = layer(x[0:1, 6:])
    torch.testing.assert_close(out[0:1, 6:], alone, rtol=TOLERANCE, atol=TOLERANCE)


@kinds
@torch.no_grad()
def test_left_padding_then_decoding(name: str) -> None:
    config, layer, x = prefilled(name, length=20)
    mask = torch.ones(2, 20, dtype=torch.bool)
    mask[1, :5] = False
    x[~mask] = torch.inf
    cache = layer.make_cache(2)
    out = [layer(x[:, :12], attention_mask=mask[:, :12], cache=cache)]
    for s in range(12, 20):  # the mask grows, as generation hands it over, or is left away
        out.append(layer(x[:, s : s + 1], attention_mask=mask[:, : s + 1] if s % 2 else None, cache=cache))
    whole = torch.cat(out, 1)
    assert cache.host_lengths == [20, 15]
    for b, first in ((0, 0), (1, 5)):
        truth = truth_of(config, parameters_of(layer), x[b, first:])
        torch.testing.assert_close(whole[b, first:].double(), truth.out, rtol=TOLERANCE, atol=TOLERANCE)


@kinds
@torch.no_grad()
def test_positions_may_be_given(name: str) -> None:
    config, layer, x = prefilled(name, batch=1)
    positions = (torch.arange(23) * 3 + 7).unsqueeze(0)
    out = layer(x, position_ids=positions)
    truth = truth_of(config, parameters_of(layer), x[0], positions[0])
    torch.testing.assert_close(out[0].double(), truth.out, rtol=TOLERANCE, atol=TOLERANCE)
    assert (out - layer(x)).abs().max() > 1e-3


@pytest.mark.parametrize("part", ["indexer", "attention"])
@torch.no_grad()
def test_the_wrong_rope_style_is_seen(part: str) -> None:
    config, layer, x = prefilled("deepseek_v32", batch=1)
    wrong = config_of("deepseek_v32", **{part: {"rope": "interleaved" if part == "indexer" else "half"}})
    out, indices = layer(x, return_indices=True)
    truth = truth_of(wrong, parameters_of(layer), x[0])
    assert (kept_of(indices[0]) != truth.kept) == (part == "indexer")
    assert (out[0] - truth.out).abs().max() > 1e-2


@torch.no_grad()
def test_with_all_tokens_kept_it_is_plain_causal_attention() -> None:
    config, layer, x = prefilled("gqa", indexer={"top_k": 64})
    q = layer.q_b_proj(layer.q_a_layernorm(layer.q_a_proj(x))).view(2, 23, 6, 14).transpose(1, 2)
    k, v = (p(x).view(2, 23, 2, 14).transpose(1, 2) for p in (layer.k_proj, layer.v_proj))
    # no turning: every token at position 0
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    expected = layer.o_proj(out.transpose(1, 2).flatten(2))
    zero = torch.zeros(1, 23, dtype=torch.int64)
    torch.testing.assert_close(layer(x, position_ids=zero), expected, rtol=TOLERANCE, atol=TOLERANCE)


@kinds
def test_gradients_are_those_of_the_oracle(name: str) -> None:
    config, layer, x = prefilled(name)
    mask = torch.ones(2, 23)
    mask[1, :4] = 0
    x.requires_grad_()
    pull = torch.randn(2, 23, HIDDEN)
    out = layer(x, attention_mask=mask)
    (out * pull).sum().backward()

    parameters = {key: value.requires_grad_() for key, value in parameters_of(layer).items()}
    exact = x.detach().double().requires_grad_()
    for b, first in ((0, 0), (1, 4)):
        truth = truth_of(config, parameters, exact[b, first:])
        (truth.out * pull[b, first:]).sum().backward()
    assert x.grad is not None and exact.grad is not None
    torch.testing.assert_close(x.grad.double(), exact.grad, rtol=1e-4, atol=TOLERANCE)
    for key, parameter in layer.named_parameters():
        if key.startswith("indexer."):
            assert parameter.grad is None, f"{key}: the indexer is not trained"
            continue
        assert parameter.grad is not None and parameters[key].grad is not None, key
        torch.testing.assert_close(parameter.grad.double(), parameters[key].grad, rtol=1e-4, atol=1e-4, msg=key)


def test_the_indexer_learns_by_its_own_loss_alone() -> None:
    config, layer, x = prefilled("deepseek_v32", batch=1, indexer={"train": True})
    x.requires_grad_()
    layer(x)
    loss = layer.indexer_loss
    assert loss is not None
    loss.backward()
    parameters = {key: value.requires_grad_() for key, value in parameters_of(layer).items()}
    truth = truth_of(config, parameters, x[0])
    truth.indexer_loss.backward()
    torch.testing.assert_close(loss.double(), truth.indexer_loss, rtol=1e-5, atol=1e-6)
    assert x.grad is None
    for key, parameter in layer.named_parameters():
        if key.startswith("indexer."):
            assert parameter.grad is not None and parameter.grad.abs().max() > 0, key
            torch.testing.assert_close(parameter.grad.double(), parameters[key].grad, rtol=1e-4, atol=1e-6, msg=key)
        else:
            assert parameter.grad is None, key
    layer.eval()
    layer(x)
    assert layer.indexer_loss is None


def test_a_call_without_tokens_adds_nothing_to_the_loss() -> None:
    _, layer, x = prefilled("deepseek_v32", indexer={"train": True})
    out = layer(x, attention_mask=torch.zeros(2, 23))
    assert layer.indexer_loss is not None
    assert layer.indexer_loss.item() == 0.0
    (layer.indexer_loss + out.sum()).backward()
    assert all(p.grad is None or bool((p.grad == 0).all()) for p in layer.parameters())


@torch.no_grad()
def test_a_layer_may_be_copied_between_forward_and_backward() -> None:
    _, layer, x = prefilled("deepseek_v32", indexer={"train": True})
    with torch.enable_grad():
        layer(x)
    twin = copy.deepcopy(layer)
    assert layer.indexer_loss is not None and twin.indexer_loss is None
    assert torch.equal(twin(x), layer(x))


def test_the_loss_of_the_indexer_falls() -> None:
    _, layer, x = prefilled("glm", batch=4, length=32, indexer={"train": True})
    optimizer = torch.optim.Adam(layer.indexer.parameters() if layer.indexer else [], lr=1e-2)
    losses = []
    for _ in range(15):
        layer(x)
        assert layer.indexer_loss is not None
        optimizer.zero_grad()
        layer.indexer_loss.backward()
        optimizer.step()
        losses.append(float(layer.indexer_loss.detach()))
    assert losses[-1] < 0.6 * losses[0], losses


@torch.no_grad()
def test_a_layer_may_take_the_choice_of_another() -> None:
    config, layer, x = prefilled("glm")
    shared = IndexerAttention(config, shared_indexer=True)
    assert not any("indexer" in key for key in shared.state_dict())
    with pytest.raises(MegaMoeError, match="give it topk_indices"):
        shared(x)
    mask = torch.ones(2, 23)
    mask[1, :9] = 0
    _, indices = layer(x, attention_mask=mask, return_indices=True)
    out = shared(x, attention_mask=mask, topk_indices=indices.long())
    parameters = parameters_of(shared) | {k: v for k, v in parameters_of(layer).items() if "indexer" in k}
    truth = truth_of(config, parameters, x[1, 9:], kept=kept_of(indices[1, 9:]))
    torch.testing.assert_close(out[1, 9:].double(), truth.out, rtol=TOLERANCE, atol=TOLERANCE)
    # in decoding too: the indices are places in the sequence, not in the cache
    caches = layer.make_cache(2), shared.make_cache(2)
    assert set(caches[1].pools) == {"rows"}
    steps = []
    for s in range(23):
        part, here = x[:, s : s + 1], mask[:, : s + 1]
        _, indices = layer(part, attention_mask=here, cache=caches[0], return_indices=True)
        steps.append(shared(part, attention_mask=here, cache=caches[1], topk_indices=indices))
    torch.testing.assert_close(torch.cat(steps, 1), out, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("options", [{"quantization": "fp8"}, {"quantization": "mxfp4"}, {"hadamard": True}])
@torch.no_grad()
def test_options_of_the_indexer(options: dict[str, Any]) -> None:
    config, layer, x = prefilled(
        "deepseek_v32", batch=1, attention={"page_size": 16}, indexer={"head_dim": 32, "heads": 8, **options}
    )
    out, indices = layer(x, return_indices=True)
    truth = truth_of(config, parameters_of(layer), x[0])
    if "hadamard" in options:  # orthonormal: the scores stay
        check(out[0], indices[0], truth)
        return
    # a kept key may only be worse than one left out by what quantisation moves a score
    spread = truth.scores.std()
    for s, kept in enumerate(kept_of(indices[0])):
        assert len(kept) == min(TOP_K, s + 1) and max(kept) <= s
        lost = [truth.scores[s, t] for t in truth.kept[s] if t not in kept]
        won = [truth.scores[s, t] for t in kept if t not in truth.kept[s]]
        assert not lost or max(lost) - min(won) < spread * (0.2 if options["quantization"] == "fp8" else 0.8)
    truth = truth_of(config, parameters_of(layer), x[0], kept=kept_of(indices[0]))
    torch.testing.assert_close(out[0].double(), truth.out, rtol=TOLERANCE, atol=TOLERANCE)
    cache = layer.make_cache(1)
    steps = [layer(part, cache=cache) for part in x.split(1, 1)]
    torch.testing.assert_close(torch.cat(steps, 1), out, rtol=TOLERANCE, atol=TOLERANCE)


@torch.no_grad()
def test_bf16_with_fp32_weights_proj() -> None:
    config, layer, x = prefilled("deepseek_v32", batch=1)
    layer.bfloat16()
    assert layer.indexer is not None
    layer.indexer.weights_proj.float()
    x = x.bfloat16()
    out, indices = layer(x, return_indices=True)
    truth = truth_of(config, parameters_of(layer), x[0], kept=kept_of(indices[0]))
    assert out.dtype == torch.bfloat16
    # about ten roundings of 2^-9 between x and the output
    assert (out[0].double() - truth.out).norm() < 0.02 * truth.out.norm()


@torch.no_grad()
def test_deepseek_names_and_fp8_matrices_load() -> None:
    config, layer, x = prefilled("deepseek_v32")
    back = {ours: theirs for theirs, ours in DEEPSEEK_NAMES.items()}
    state: dict[str, Tensor] = {}
    for key, value in layer.state_dict().items():
        stem, _, last = key.rpartition(".")
        name = f"layers.0.attn.{back.get(stem, stem)}.{last}"
        if last == "weight" and value.dim() == 2 and "weights_proj" not in key:
            value, state[name.replace("weight", "weight_scale_inv")] = formats.quantize_e4m3_weight(value)
        state[name] = value
    assert "layers.0.attn.wkv_a.weight" in state and "layers.0.attn.indexer.wk.weight_scale_inv" in state
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList([torch.nn.Module()])  # type: ignore[assignment]
    model.layers[0].attn = twin = IndexerAttention(config)  # type: ignore[union-attr]
    held = dict(state)
    model.load_state_dict(state)
    assert state.keys() == held.keys()
    expected = copy.deepcopy(layer)
    for key, parameter in expected.named_parameters():
        if parameter.dim() == 2 and "weights_proj" not in key:
            parameter.copy_(formats.dequantize_e4m3_weight(*formats.quantize_e4m3_weight(parameter)))
    assert torch.equal(twin(x), expected(x))
    assert not torch.equal(twin(x), layer(x))


@pytest.mark.parametrize("name", ["deepseek_v32", "deepseek_v4"])
def test_fp8_matrices_and_their_scales_come_together(name: str) -> None:
    layer = make_attention(config_of(name))
    state = layer.state_dict()
    codes = {**state, "q_a_proj.weight": state["q_a_proj.weight"].to(torch.float8_e4m3fn)}
    with pytest.raises(
        ValueError, match="^q_a_proj.weight: is float8_e4m3fn and has no scales; .* q_a_proj.weight_scale"
    ):
        layer.load_state_dict(codes)
    with pytest.raises(ValueError, match="^q_a_proj.weight_scale_inv: stands beside q_a_proj.weight, which must be"):
        layer.load_state_dict({**state, "q_a_proj.weight_scale_inv": torch.ones(1, 1)})
    with pytest.raises(ValueError, match="^q_a_proj.weight_scale_inv: .*shape"):
        layer.load_state_dict({**codes, "q_a_proj.weight_scale_inv": torch.ones(3, 3)})


@torch.no_grad()
def test_sequences_of_different_lengths_and_empty_ones() -> None:
    config, layer, _ = prefilled("gqa")
    x = torch.randn(3, 11, HIDDEN)
    mask = torch.zeros(3, 11)
    mask[0, 4:] = 1
    mask[2] = 1
    cache = layer.make_cache(3)
    first = layer(x, attention_mask=mask, cache=cache)
    assert cache.host_lengths == [7, 0, 11] and (first[1] == 0).all()
    y = torch.randn(3, 2, HIDDEN)
    second, indices = layer(y, cache=cache, return_indices=True)
    for b, earlier in enumerate((x[0, 4:], x[1, :0], x[2])):
        truth = truth_of(config, parameters_of(layer), torch.cat([earlier, y[b]]))
        check(second[b], indices[b], truth._replace(out=truth.out[-2:], kept=truth.kept[-2:]))
    assert layer(x[:, :0]).shape == (3, 0, HIDDEN)
    assert layer(x[:0]).shape == (0, 11, HIDDEN)


def test_refusals() -> None:
    config, layer, x = prefilled("deepseek_v32")
    with pytest.raises(ValueError, match=r"hidden_states: must be \[B, S, 32\]"):
        layer(x[..., :16])
    with pytest.raises(ValueError, match=r"attention_mask: must be \[2, 23\]"):
        layer(x, attention_mask=torch.ones(2, 22))
    with pytest.raises(ValueError, match="cache: must be for the 2 sequences"):
        layer(x, cache=layer.make_cache(3))
    with pytest.raises(ValueError, match="hidden_states: must be a floating tensor, got torch.int64"):
        layer(x.long())
    with pytest.raises(ValueError, match=r"attention_mask: must be \[2, 23\] without a cache"):
        layer(x, attention_mask=torch.ones(2, 30))
    with pytest.raises(ValueError, match="attention_mask: must be a tensor on cpu, got list"):
        layer(x, attention_mask=[[1] * 23] * 2)
    cache, none = layer.make_cache(2), torch.full((2, 23, 1), -1)
    for wrong, match in (
        ({"topk_indices": none[:, :22]}, r"topk_indices: must be int32 or int64 \[2, 23, K\]"),
        ({"topk_indices": none.float()}, "topk_indices: must be int32 or int64 .* got torch.float32"),
        ({"topk_indices": none + 1 + torch.arange(23)[:, None] + torch.eye(23).long()[4, :, None]},
         "token 4 of sequence 0 may keep places below 5, got 5"),
        ({"position_ids": torch.zeros(2, 22)}, r"position_ids: must be \[2, 23\] or \[1, 23\], got \[2, 22\]"),
        ({"position_ids": torch.zeros(1, 2, 23)}, r"position_ids: must be .* got \[1, 2, 23\]"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=match):
            layer(x, cache=cache, **wrong)
    for other, match in (
        (FP8, "'keys' with rows of 16 torch.float32 on cpu, and the cache has rows of 36 torch.uint8"),
        ({"attention": {"kv_lora": 24}}, "'rows' with rows of 28 torch.float32 on cpu, and the cache has rows of 32"),
        ({"dtype": "bfloat16"}, "has rows of 28 torch.bfloat16"),
    ):
        with pytest.raises(ValueError, match=match):
            layer(x, cache=layer_of(config_of("deepseek_v32", **other)).make_cache(2))
    with pytest.raises(ValueError, match="cache: must be a PagedCache of make_cache, got str"):
        layer(x, cache="cache")
    assert cache.host_lengths == [0, 0], "a refused call changes nothing"
    layer(x, cache=cache)
    with pytest.raises(MegaMoeError, match="a gradient is asked for and the cache holds earlier tokens"):
        layer(x, cache=cache)
    bare = MoEConfig.from_dict({"model": {"hidden": 8, "intermediate": 8, "num_experts": 2, "top_k": 1},
                                "router": {"score": "softmax"}})  # fmt: skip
    with pytest.raises(ConfigError, match="add them"):
        IndexerAttention(bare)


@pytest.mark.parametrize(
    "place",
    [
        "paged_cache.PagedCache._grow",
        "paged_cache.PagedCache._upload_table",
        "paged_cache.PagedCache.slots",
        "paged_cache.PagedCache.write",
        "indexer_attention.write_rows",
        "indexer_attention.IndexerAttention._choose",
        "indexer_attention.sparse_attention",
        "token_layout.TokenLayout.unpack",
    ],
)
@torch.no_grad()
def test_a_call_that_ends_early_adds_no_token(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, layer, x = prefilled("deepseek_v32", attention={"page_size": 4})
    cache, other = layer.make_cache(2), layer.make_cache(2)
    for target in (cache, other):
        layer(x[:, :3], cache=target)

    def stop(*_: object, **__: object) -> None:
        monkeypatch.undo()  # what takes the tokens back is not stopped
        raise KeyboardInterrupt

    monkeypatch.setattr(f"megamoe.layers.{place}", stop)
    with pytest.raises(KeyboardInterrupt):
        layer(x[:, 3:], cache=cache)
    assert cache.host_lengths == cache.lengths.tolist() == [3, 3] and cache.block_table.shape == (2, 1)
    assert len({*cache._free, *cache.block_table.flatten().tolist()}) == cache.num_pages, "no page is lost"
    assert torch.equal(layer(x[:, 3:], cache=cache), layer(x[:, 3:], cache=other))


@torch.no_grad()
def test_parts_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    _, layer, x = prefilled("deepseek_v32")
    out = layer(x)
    monkeypatch.setattr("megamoe.layers.indexer_attention._PART", 4)
    torch.testing.assert_close(layer(x), out, rtol=1e-6, atol=1e-6)


@torch.no_grad()
def test_the_same_bits_every_time() -> None:
    _, layer, x = prefilled("glm", batch=3)
    assert all(torch.equal(layer(x), layer(x)) for _ in range(3))


@pytest.mark.parametrize("quantization", ["none", "fp8"])
@pytest.mark.parametrize("name", ["deepseek_v32", "deepseek_v4"])
def test_a_cache_may_be_made_in_inference_mode_and_used_outside(name: str, quantization: str) -> None:
    options = {"heads": 8, "head_dim": 32, "quantization": quantization}
    layer = make_attention(config_of(name, attention={"page_size": 16}, indexer=options))
    x = torch.randn(2, 60, HIDDEN)
    with torch.inference_mode():
        cache: Any = layer.make_cache(2)
        out = [layer(x[:, :33], cache=cache), layer(x[:, 33:34], cache=cache)]
    with torch.no_grad():
        out += [layer(x[:, 34:35], cache=cache), layer(x[:, 35:50], cache=cache)]
        cache_of_pages = cache.pages if name == "deepseek_v4" else cache
        assert not cache_of_pages.pools["rows"].is_inference()
    with torch.inference_mode():
        out += [layer(x[:, 50:], cache=cache)]
    with torch.no_grad():
        torch.testing.assert_close(torch.cat(out, 1), layer(x), rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("name", [*sorted(KINDS), "deepseek_v4"])
def test_autocast(name: str) -> None:
    layer = make_attention(config_of(name))
    x = torch.randn(2, 20, HIDDEN)
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x)
        out.float().square().sum().backward()
    with torch.no_grad():
        exact = layer(x)
    assert out.dtype == torch.float32 and layer.q_a_proj.weight.grad is not None
    # other keys may be kept where BF16 scores are close
    assert (out - exact).norm() < 0.2 * exact.norm()


@pytest.mark.parametrize("quantization", ["none", "fp8"])
@pytest.mark.parametrize("name", [*sorted(KINDS), "deepseek_v4"])
@torch.no_grad()
def test_decoding_under_autocast_and_in_fp16(name: str, quantization: str) -> None:
    sizes = {"quantization": quantization, "heads": 8, "head_dim": 32, "top_k": 32}  # all are kept
    layer = make_attention(config_of(name, indexer=sizes, attention={"page_size": 16}))
    x = torch.randn(2, 20, HIDDEN)
    exact = layer(x)

    def decoded(layer: torch.nn.Module, x: Tensor) -> Tensor:
        cache = layer.make_cache(2)
        return torch.cat([layer(part, cache=cache) for part in (x[:, :15], x[:, 15:16], x[:, 16:])], 1)

    with torch.autocast("cpu", torch.bfloat16):
        out = decoded(layer, x)
    assert out.dtype == torch.float32 and (out - exact).norm() < 0.03 * exact.norm()
    out = decoded(layer.half(), x.half())
    assert out.dtype == torch.float16 and (out - exact).norm() < 0.01 * exact.norm()


class LargestTensor(TorchDispatchMode):
    """Watch the elements of every tensor that an operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        result = function(*arguments, **(options or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.elements = max(self.elements, leaf.numel())
        return result


@pytest.mark.parametrize("name", [*sorted(KINDS), "deepseek_v4"])
@torch.no_grad()
def test_nothing_of_queries_times_keys_is_made(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Elements of the largest tensor of a prefill, whose budgets are shrunk to what a test can afford."""
    length, keys = (2048, 512) if name == "deepseek_v4" else (1024, 1024)
    layer = make_attention(config_of(name, indexer={"max_logits_mib": 1}))
    for module in ("indexer_attention", "compressed_attention"):
        monkeypatch.setattr(f"megamoe.layers.{module}._PART", 64)
    x = torch.randn(1, length, HIDDEN)
    with LargestTensor() as watch:
        layer(x)
    # the budget holds 2^18 products, a quarter of queries x keys; the rest is linear in the tokens
    assert watch.elements < length * keys / 2, watch.elements
