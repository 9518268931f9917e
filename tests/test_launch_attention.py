"""Presets with an indexer under the launcher, and the check of their attention layers: it passes, and it can fail."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch
from helpers_attention import HIDDEN, compressed_layer_of, config_of, layer_of
from helpers_launch import QUICKSTART, SMALL, megamoe

from megamoe.launch.attention_check import check_attention

MODEL = [*SMALL, "model.vocab_size=null", "launch.batch_tokens=40", "launch.nproc=2", "launch.layers=1",
         "parallel.expert_parallel_size=2", "router.groups=1", "router.topk_groups=1", "indexer.heads=8",
         "indexer.head_dim=32", "indexer.top_k=6", "attention.heads=4", "attention.q_lora=32",
         "attention.rope_dim=16"]  # fmt: skip
LATENT = ["attention.kv_lora=32", "attention.nope_dim=16", "attention.value_dim=16"]
COMPRESSED = ["attention.head_dim=32", "attention.window=8", "attention.output_groups=2", "attention.output_lora=16"]


@pytest.mark.parametrize(
    ("preset", "keys", "said"),
    [
        ("deepseek_v32", LATENT, "mla, 4 heads, top 6, indexer fp8"),
        ("glm_5", [*LATENT, "indexer.quantization=none"], "mla, 4 heads, top 6, indexer none"),
        ("deepseek_v4_flash", COMPRESSED, "compressed, 4 heads, top 6, indexer mxfp4"),
    ],
)
def test_a_preset_with_an_indexer_runs_and_is_checked(preset: str, keys: list[str], said: str) -> None:
    done = megamoe("launch", preset, *MODEL, *keys)
    assert done.returncode == 0, done.stdout + done.stderr
    line = next(line for line in done.stdout.splitlines() if "attention layers" in line)
    assert said in line and "within tolerance" in line
    errors = re.search(r"max error (\S+), worst choice (\S+) sizes", line)
    assert errors and float(errors[1]) > 0, "BF16 against float64 is never exact"


@pytest.mark.slow
def test_training_with_attention_learns() -> None:
    done = megamoe("launch", QUICKSTART, *SMALL, *MODEL[len(SMALL) :], *LATENT, "launch.job=train", "launch.steps=40",
                   "launch.batch_tokens=256", "launch.learning_rate=1e-2", "indexer.train=true")  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "last loss" in done.stdout


def test_an_indexer_without_attention_is_one_sentence() -> None:
    done = megamoe("launch", QUICKSTART, "indexer.heads=4", "indexer.head_dim=32", "indexer.top_k=4")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "section 'indexer' has no section 'attention' beside it" in done.stderr


@pytest.mark.parametrize("name", ["deepseek_v32", "deepseek_v4"])
@torch.no_grad()
def test_the_check_can_fail(name: str) -> None:
    config = config_of(name)
    layer = (compressed_layer_of if name == "deepseek_v4" else layer_of)(config)
    x = torch.randn(1, 40, HIDDEN)
    y, indices = (part[0] for part in layer(x, return_indices=True))
    good = check_attention(config, layer, x[0], y, indices)
    assert good.failure is None and good.worst_row < 1e-11 and good.worst_choice < 1e-5

    wrong = y.clone()
    wrong[33, 3] *= 1.01
    failure = check_attention(config, layer, x[0], wrong, indices).failure
    assert failure is not None and "of token 33" in failure

    # another choice, and the output that goes with it
    other = indices.clone()
    left = next(t for t in range(40) if t not in indices[39].tolist())
    other[39, 0] = left
    y, _ = layer(x, topk_indices=other.unsqueeze(0), return_indices=True)
    failure = check_attention(config, layer, x[0], y[0], other).failure
    assert failure is not None and "token 39 keeps a key that scores" in failure

    for bad in (38, 39, -1, int(indices[30, 1])):  # later than the query, twice, or missing
        other = indices.clone()
        other[30, 0] = bad
        failure = check_attention(config, layer, x[0], y[0], other).failure
        assert failure is not None and "token 30 keeps" in failure

    # a parameter that changed after the call
    next(p for n, p in layer.named_parameters() if n.startswith("o_")).mul_(1.001)
    y = layer(x)[0]
    next(p for n, p in layer.named_parameters() if n.startswith("o_")).div_(1.001)
    assert check_attention(config, layer, x[0], y, indices).failure is not None


def test_bounds_follow_the_format() -> None:
    config = config_of("glm", attention={"page_size": 16}, indexer={"heads": 8, "head_dim": 32})
    assert config.indexer is not None
    x = torch.randn(1, 30, HIDDEN)
    layer = layer_of(config)
    with torch.no_grad():
        y, indices = (part[0] for part in layer(x, return_indices=True))
        gap = check_attention(config, layer, x[0], y, indices).worst_choice
    assert -5 < gap < 1e-4
    fp8 = dataclasses.replace(config, indexer=dataclasses.replace(config.indexer, quantization="fp8"))
    assert check_attention(fp8, layer, x[0], y, indices).failure is None


def test_heads_that_cancel_do_not_make_roundings_look_wrong() -> None:
    """One pair of heads with weights of opposite sign: scores are small, and their roundings are those of the heads."""
    config = config_of("glm", attention={"page_size": 16}, indexer={"heads": 8, "head_dim": 32, "top_k": 8})
    assert config.indexer is not None
    fp8 = dataclasses.replace(config, indexer=dataclasses.replace(config.indexer, quantization="fp8"))
    layer = layer_of(fp8)
    x = torch.randn(1, 200, HIDDEN)
    with torch.no_grad():
        queries, weights = layer.indexer.wq_b.weight.view(8, 32, -1), layer.indexer.weights_proj.weight
        queries[4:] = queries[:4] + 0.05 * torch.randn_like(queries[:4])
        weights[4:] = -weights[:4]
        y, indices = (part[0] for part in layer(x, return_indices=True))
    found = check_attention(fp8, layer, x[0], y, indices)
    assert found.failure is None and found.worst_choice > 0, found
    # FP32's bound still sees that something was rounded
    assert check_attention(config, layer, x[0], y, indices).failure is not None
