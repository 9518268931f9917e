"""The presets: they load by every way, they are the published models, and overrides shrink them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megamoe.config import MoEConfig, preset_names
from megamoe.config_report import resolved_report, sizes
from megamoe.errors import ConfigError

ROOT = Path(__file__).resolve().parents[1]

# hidden, intermediate, experts, top_k, score, renormalize, scale, weights, act_scale, shared experts
FACTS: dict[str, tuple[int, int, int, int, str, bool, float, str, str, int]] = {
    "deepseek_v3": (7168, 2048, 256, 8, "sigmoid", True, 2.5, "fp8_block", "block128", 1),
    "deepseek_v32": (7168, 2048, 256, 8, "sigmoid", True, 2.5, "fp8_block", "block128", 1),
    "deepseek_v4_flash": (4096, 2048, 256, 6, "sqrtsoftplus", True, 1.5, "mxfp4", "token", 1),
    "deepseek_v4_pro": (7168, 3072, 384, 6, "sqrtsoftplus", True, 2.5, "mxfp4", "token", 1),
    "glm_5": (6144, 2048, 256, 8, "sigmoid", True, 2.5, "fp8_block", "block128", 1),
    "gpt_oss_120b": (2880, 2880, 128, 4, "topk_softmax", False, 1.0, "mxfp4", "token", 0),
    "kimi_k2": (7168, 2048, 384, 8, "sigmoid", True, 2.827, "fp8_block", "block128", 1),
    "mixtral_8x7b": (4096, 14336, 8, 2, "softmax", True, 1.0, "none", "none", 0),
    "quickstart": (256, 512, 32, 4, "softmax", True, 1.0, "mxfp4", "token", 1),
    "qwen3_235b_a22b": (4096, 1536, 128, 8, "softmax", True, 1.0, "none", "none", 0),
    "qwen3_30b_a3b": (2048, 768, 128, 8, "softmax", True, 1.0, "none", "none", 0),
}

# (MoE layers, parameters in all, 1e9), as the model cards say. Routed experts are most of such a model and no more.
PUBLISHED: dict[str, tuple[int, float]] = {
    "deepseek_v3": (58, 671),
    "deepseek_v32": (58, 671),
    "deepseek_v4_flash": (43, 284),
    "deepseek_v4_pro": (61, 1600),
    "glm_5": (75, 744),
    "gpt_oss_120b": (36, 117),
    "kimi_k2": (60, 1040),
    "mixtral_8x7b": (32, 46.7),
    "qwen3_235b_a22b": (94, 235),
    "qwen3_30b_a3b": (48, 30.5),
}

SHRUNK = ["model.hidden=64", "model.intermediate=32", "model.num_experts=16", "parallel.expert_parallel_size=2"]


def test_the_presets_are_these() -> None:
    assert preset_names() == sorted(FACTS)
    assert sorted(path.stem for path in (ROOT / "configs").glob("*.yaml")) == sorted(FACTS)


@pytest.mark.parametrize("name", sorted(FACTS))
def test_values(name: str) -> None:
    config = MoEConfig.from_yaml(name)
    spec, router = config.spec, config.router
    assert FACTS[name] == (
        spec.hidden,
        spec.intermediate,
        spec.num_experts,
        spec.top_k,
        router.score,
        router.renormalize,
        router.scale,
        spec.weight_format,
        spec.act_scale,
        config.model.shared_experts,
    )
    assert (config.model.dtype, config.launch.job, router.aux_loss) == ("bfloat16", "infer", 0.0)
    assert router.bias == (router.score in ("sigmoid", "sqrtsoftplus"))


def test_values_of_single_models() -> None:
    load = MoEConfig.from_yaml
    assert (load("deepseek_v3").router.groups, load("deepseek_v3").router.topk_groups) == (8, 4)
    assert load("kimi_k2").router.groups == load("glm_5").router.groups == 1
    for name, top_k in (("deepseek_v4_flash", 512), ("deepseek_v4_pro", 1024)):
        config = load(name)
        assert (config.spec.activation, config.spec.swiglu_limit) == ("swiglu_clamp", 10.0)
        assert config.model.vocab_size == 129280 and config.indexer is not None
        assert (config.indexer.heads, config.indexer.head_dim, config.indexer.top_k) == (64, 128, top_k)
        assert load(name, ["router.select=hash", "router.bias=false"]).router.select == "hash"
    gpt_oss = load("gpt_oss_120b")
    assert (gpt_oss.spec.activation, gpt_oss.spec.swiglu_alpha, gpt_oss.spec.swiglu_limit) == ("swiglu_oai", 1.702, 7.0)
    assert gpt_oss.spec.expert_bias and gpt_oss.router.logit_bias and not gpt_oss.router.bias
    for name, heads, rope in (("glm_5", 32, "interleaved"), ("deepseek_v32", 64, "half")):
        indexer = load(name).indexer
        assert indexer is not None
        assert (indexer.heads, indexer.head_dim, indexer.top_k, indexer.rope) == (heads, 128, 2048, rope)
        assert (indexer.quantization, indexer.hadamard) == ("fp8", True)


# kind, heads, width of a query head, q_lora, theta, YaRN factor
ATTENTION: dict[str, tuple[str, int, int, int, float, float]] = {
    "deepseek_v32": ("mla", 128, 192, 1536, 1e4, 40.0),
    "deepseek_v4_flash": ("compressed", 64, 512, 1024, 1.6e5, 16.0),
    "deepseek_v4_pro": ("compressed", 128, 512, 1536, 1.6e5, 16.0),
    "glm_5": ("mla", 64, 256, 2048, 1e6, 1.0),
}


def test_attention_of_the_presets_with_an_indexer() -> None:
    for name in FACTS:
        config = MoEConfig.from_yaml(name)
        assert (config.attention is not None) == (config.indexer is not None) == (name in ATTENTION), name
        if config.attention is None:
            continue
        a = config.attention
        assert (a.kind, a.heads, a.query_dim, a.q_lora, a.rope_theta, a.yarn_factor) == ATTENTION[name]
        assert (a.rope_dim, a.rope) == (64, "interleaved")
        if a.kind == "mla":
            assert a.kv_lora == 512
        else:
            assert a.output_groups is not None and (a.window, a.heads // a.output_groups) == (128, 8)


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_routed_experts_are_most_of_the_published_parameters(name: str) -> None:
    layers, billions = PUBLISHED[name]
    one = sizes(MoEConfig.from_yaml(name, ["parallel.expert_parallel_size=1"]))
    share = layers * one.expert_parameters / (billions * 1e9)
    assert 0.94 < share < 1.0, share


@pytest.mark.parametrize("name", sorted(FACTS))
def test_round_trip_and_report(name: str) -> None:
    config = MoEConfig.from_yaml(name)
    again = MoEConfig.from_dict(config.to_dict(), source="again")
    assert again == config and again.spec == config.spec
    report = resolved_report(config)
    assert f"configuration: preset {name}" in report and f"for {config.spec.num_experts} experts" in report


@pytest.mark.parametrize("name", sorted(FACTS))
def test_shrunk_by_overrides(name: str) -> None:
    overrides = [*SHRUNK, "launch.nproc=null"]
    config = MoEConfig.from_yaml(ROOT / "configs" / f"{name}.yaml", overrides)
    assert (config.spec.hidden, config.spec.intermediate, config.spec.num_experts) == (64, 32, 16)
    assert config.world_size == 2 and config.spec.weight_format == FACTS[name][7]
    train = MoEConfig.from_yaml(name, [*overrides, "quantization.weights=none", "launch.job=train"])
    assert (train.spec.weight_format, train.spec.act_scale) == ("none", "none")


@pytest.mark.parametrize("name", sorted(FACTS))
def test_every_value_has_its_source(name: str) -> None:
    text = (ROOT / "configs" / f"{name}.yaml").read_text()
    assert re.search(r"^# Source: \S", text, re.MULTILINE) and text.isascii()
    assert max(map(len, text.splitlines())) <= 120
    if name == "quickstart":
        return
    for key in ("hidden", "intermediate", "num_experts", "top_k", "score", "weights", "renormalize"):
        lines = re.findall(rf"^  {key}: .*$", text, re.MULTILINE)
        assert lines and all("  # " in line for line in lines), lines


def test_quickstart_trains_without_another_override() -> None:
    infer = MoEConfig.from_yaml(ROOT / "configs" / "quickstart.yaml")
    train = MoEConfig.from_yaml(ROOT / "configs" / "quickstart.yaml", ["launch.job=train"])
    assert (infer.spec.weight_format, train.spec.weight_format) == ("mxfp4", "none")
    assert (infer.nproc, infer.launch.layers, infer.launch.batch_tokens) == (4, 2, 128)
    assert (infer.parallel.expert_parallel_size, infer.parallel.max_tokens_per_rank) == (4, 512)
    assert "launch.job=train" in train.notes[0] and "launch.job=train" in resolved_report(train)


def test_quantised_presets_refuse_training() -> None:
    with pytest.raises(ConfigError, match=r"preset glm_5 with .*launch.job=train needs quantization.weights=none"):
        MoEConfig.from_yaml("glm_5", ["launch.job=train"])


def test_found_from_any_folder_and_a_file_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for spelling in ("quickstart", "quickstart.yaml", "configs/quickstart.yaml", Path("configs") / "quickstart.yaml"):
        assert MoEConfig.from_yaml(spelling).source == "preset quickstart"
    for spelling in ("configs/quickstart", "other/quickstart.yaml", str(tmp_path / "quickstart.yaml")):
        with pytest.raises(ConfigError, match="no such file or preset"):
            MoEConfig.from_yaml(spelling)
    (tmp_path / "quickstart").mkdir()
    assert MoEConfig.from_yaml("quickstart").source == "preset quickstart"
    (tmp_path / "configs").mkdir()
    shadow = (ROOT / "configs" / "quickstart.yaml").read_text().replace("hidden: 256", "hidden: 96")
    (tmp_path / "configs" / "quickstart.yaml").write_text(shadow)
    config = MoEConfig.from_yaml("configs/quickstart.yaml")
    assert (config.source, config.model.hidden) == ("configs/quickstart.yaml", 96)
    assert MoEConfig.from_yaml("quickstart").model.hidden == 256


def test_found_through_the_package_in_another_process(tmp_path: Path) -> None:
    code = "from megamoe import MoEConfig; print(MoEConfig.from_yaml('kimi_k2').spec.num_experts)"
    environment: dict[str, Any] = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "384", done.stderr
