"""The configuration: strict YAML, one sentence for every mistake, and never a traceback."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers_config import BASE, data, sentence

from megamoe.config import (
    IndexerConfig,
    ModelConfig,
    MoEConfig,
    MoESpec,
    QuantizationConfig,
    RouterConfig,
    local_expert_range,
    valid_expert_parallel_sizes,
)

Writer = Callable[[str], Path]

INDEXER = {"heads": 4, "head_dim": 64, "top_k": 8, "rope": "interleaved"}
MLA = {"kind": "mla", "heads": 4, "q_lora": 16, "rope_dim": 8, "kv_lora": 16, "nope_dim": 8, "value_dim": 8}
GQA = {"kind": "gqa", "heads": 4, "q_lora": 16, "rope_dim": 8, "kv_heads": 2, "head_dim": 12}
COMPRESSED = {"kind": "compressed", "heads": 4, "q_lora": 16, "rope_dim": 8, "head_dim": 12, "window": 8,
              "output_groups": 2, "output_lora": 16}  # fmt: skip


@pytest.fixture
def write(tmp_path: Path) -> Writer:
    def write_yaml(text: str) -> Path:
        path = tmp_path / "case.yaml"
        path.write_text(text)
        return path

    return write_yaml


# --- what works ---


def test_defaults_and_resolution(write: Writer) -> None:
    config = MoEConfig.from_yaml(write(BASE))
    assert config.source.endswith("case.yaml")
    assert (config.model.dtype, config.model.weight_position, config.model.activation) == ("bfloat16", "after", "silu")
    assert (config.parallel.max_tokens_per_rank, config.parallel.timeout_s) == (8192, 600.0)
    assert (config.launch.job, config.launch.layers, config.launch.steps) == ("infer", 2, 200)
    assert (config.nproc, config.world_size, config.indexer, config.notes) == (4, 4, None, ())
    assert config.model.shared_width == 512
    assert config.spec == MoESpec(hidden=256, intermediate=512, num_experts=32, top_k=4)
    assert (config.spec.weight_format, config.spec.act_scale) == ("none", "none")


@pytest.mark.parametrize(
    ("weights", "asked", "act_scale"),
    [
        ("none", "auto", "none"),
        ("none", "token", "none"),
        ("mxfp4", "auto", "token"),
        ("mxfp4", "block128", "block128"),
        ("fp8_block", "auto", "block128"),
        ("fp8_block", "token", "token"),
    ],
)
def test_act_scale_follows_the_weights(weights: str, asked: str, act_scale: str) -> None:
    config = MoEConfig.from_dict(data(quantization={"weights": weights, "act_scale": asked}))
    assert (config.spec.weight_format, config.spec.act_scale) == (weights, act_scale)


@pytest.mark.parametrize(("job", "weights"), [("infer", "mxfp4"), ("script", "mxfp4"), ("train", "none")])
def test_auto_weights_follow_the_job_and_say_so(job: str, weights: str) -> None:
    config = MoEConfig.from_dict(data(quantization={"weights": "auto"}, launch={"job": job}))
    assert config.quantization.weights == config.spec.weight_format == weights
    assert config.to_dict()["quantization"] == {"weights": weights, "act_scale": "auto"}
    (note,) = config.notes
    assert f"auto is {weights}" in note and f"launch.job={job}" in note
    assert MoEConfig.from_dict(data()).notes == ()


def test_swiglu_oai_has_its_alpha() -> None:
    assert MoEConfig.from_dict(data(model={"activation": "swiglu_oai"})).spec.swiglu_alpha == 1.702
    assert MoEConfig.from_dict(data(model={"activation": "swiglu_oai", "swiglu_alpha": 2})).spec.swiglu_alpha == 2.0
    assert MoEConfig.from_dict(data(model={"activation": "swiglu_clamp"})).spec.swiglu_limit is None


def test_integers_become_floats_where_floats_are_meant() -> None:
    config = MoEConfig.from_dict(data(router={"scale": 2}, parallel={"timeout_s": 5}))
    assert type(config.router.scale) is float and type(config.parallel.timeout_s) is float


def test_overrides_are_yaml_scalars_and_the_last_wins(write: Writer) -> None:
    overrides = [
        "model.num_experts=16",
        "model.num_experts=8",
        "router.bias=true",
        "launch.learning_rate=1e-3",
        "model.shared_intermediate=64",
        "quantization.weights=mxfp4",
        "indexer.heads=4",
        "indexer.head_dim=32",
        "indexer.top_k=64",
        "launch.nproc=null",
    ]
    config = MoEConfig.from_yaml(write(BASE), overrides)
    assert config.model.num_experts == 8 and config.router.bias is True
    assert config.launch.learning_rate == 1e-3 and config.model.shared_width == 64
    assert config.indexer == IndexerConfig(heads=4, head_dim=32, top_k=64) and config.launch.nproc is None
    assert config.spec.weight_format == "mxfp4"


def test_round_trip_pickle_and_freeze() -> None:
    config = MoEConfig.from_dict(data(launch={"nproc": 8}, indexer={"heads": 2, "head_dim": 8, "top_k": 4}))
    assert MoEConfig.from_dict(config.to_dict()) == config
    assert pickle.loads(pickle.dumps(config)) == config
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.model.hidden = 1  # type: ignore[misc]
    with pytest.raises(TypeError):
        ModelConfig(256, 512, 32, 4)  # type: ignore[misc]


def test_the_given_data_is_left_alone() -> None:
    given_data = data()
    MoEConfig.from_dict(given_data, overrides=["model.num_experts=8", "launch.seed=3"])
    assert given_data == data()


def test_several_nodes() -> None:
    config = MoEConfig.from_dict(data(launch={"nnodes": 2}))
    assert (config.nproc, config.world_size) == (2, 4)
    config = MoEConfig.from_dict(data(launch={"nnodes": 2, "nproc": 4}))  # two groups of four
    assert (config.nproc, config.world_size) == (4, 8)


def test_local_expert_range_covers_every_expert_once() -> None:
    for num_experts, world_size in [(1, 1), (32, 4), (384, 48), (1024, 64)]:
        owned = [local_expert_range(num_experts, rank, world_size) for rank in range(world_size)]
        assert [e for first, last in owned for e in range(first, last)] == list(range(num_experts))
    message = sentence(lambda: local_expert_range(10, 0, 4))
    assert "num_experts=10" in message and "world_size=4" in message and "1, 2, 5, 10" in message
    for rank, world_size in [(-1, 4), (4, 4), (0, 0)]:
        with pytest.raises(ValueError, match="rank must be in"):
            local_expert_range(32, rank, world_size)


def test_valid_expert_parallel_sizes() -> None:
    assert valid_expert_parallel_sizes(10) == [1, 2, 5, 10]
    assert valid_expert_parallel_sizes(1024) == [1, 2, 4, 8, 16, 32, 64]
    assert valid_expert_parallel_sizes(1024, limit=128)[-1] == 128


# --- one sentence: names ---


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("modl: {hidden: 1}\n" + BASE, ["unknown section 'modl'", "did you mean 'model'?"]),
        ("qqq: 1\n" + BASE, ["unknown section 'qqq'", "valid sections are model, router"]),
        ("top_k: 4\n" + BASE, ["unknown section 'top_k'", "did you mean 'model.top_k'?"]),
        (BASE.replace("hidden:", "hiden:"), ["unknown key 'hiden' in section 'model'", "did you mean 'hidden'?"]),
        (BASE.replace("hidden:", "Hidden:"), ["unknown key 'Hidden'", "did you mean 'hidden'?"]),
        (BASE.replace("top_k: 4", "groups: 8"), ["unknown key 'groups'", "did you mean 'router.groups'?"]),
        (BASE.replace("top_k:", "num_experts_per_tok:"), ["'num_experts_per_tok'", "did you mean 'top_k'?"]),
        (BASE.replace("score:", "scoring_func:"), ["unknown key 'scoring_func'", "did you mean 'score'?"]),
        (BASE.replace("top_k: 4", "zzz: 4"), ["unknown key 'zzz'", "valid keys are hidden, intermediate"]),
        (BASE.replace("top_k: 4, ", ""), ["model.top_k is missing", "section 'model' needs hidden, intermediate"]),
        (
            BASE.replace("router", "kernel", 1).replace("{score: softmax}", "{}"),
            ["section 'router' is missing", "score"],
        ),
        (BASE.replace("{score: softmax}", "softmax"), ["section 'router' must be a mapping", "got 'softmax'"]),
        (BASE + "kernel:\n", ["section 'kernel' must be a mapping", "got null"]),
        ("", ["must be a mapping of the sections model, router", "got nothing"]),
        ("- 1\n- 2\n", ["must be a mapping of the sections", "got [1, 2]"]),
        ("hello", ["must be a mapping of the sections", "got 'hello'"]),
    ],
)
def test_wrong_names(write: Writer, text: str, pieces: list[str]) -> None:
    path = write(text)
    message = sentence(lambda: MoEConfig.from_yaml(path))
    for piece in [f"{path}: ", *pieces]:
        assert piece in message, message


@pytest.mark.parametrize(
    ("override", "pieces"),
    [
        ("model.num_expert=16", ["'model.num_expert=16'", "unknown key 'model.num_expert'", "'model.num_experts'?"]),
        ("model.scale=2", ["unknown key 'model.scale'", "did you mean 'router.scale'?"]),
        ("model.num_experts_per_tok=2", ["did you mean 'model.top_k'?"]),
        ("lanch.job=train", ["unknown section 'lanch'", "did you mean 'launch'?"]),
        ("model.zzz=1", ["unknown key 'model.zzz'", "valid keys are hidden"]),
        ("model.hidden", ["'model.hidden'", "must look like section.key=value"]),
        ("hidden=4", ["'hidden=4'", "must look like section.key=value"]),
        ("=4", ["must look like section.key=value"]),
        ("model.=4", ["must look like section.key=value"]),
        ("model.hidden=[1,", ["'model.hidden=[1,'", "not valid YAML at line 1"]),
        ("model.hidden=x\ny: z", ["override", "not valid YAML"]),
        ("model.hidden=!!int 4", ["the tag '!!int' is not allowed"]),
    ],
)
def test_wrong_overrides(write: Writer, override: str, pieces: list[str]) -> None:
    path = write(BASE)
    message = sentence(lambda: MoEConfig.from_yaml(path, [override]))
    for piece in [f"{path}: override ", *pieces]:
        assert piece in message, message


def test_a_wrong_value_from_the_command_line_is_told_from_one_in_the_file(write: Writer) -> None:
    path = write(BASE)
    sentence(lambda: MoEConfig.from_yaml(path, ["model.num_experts=\n  10"]))
    message = sentence(lambda: MoEConfig.from_yaml(path, ["launch.seed=1", "model.num_experts=10"]))
    assert message.startswith(f"{path} with model.num_experts=10: model.num_experts=10 is not divisible by ")
    assert "launch.seed" not in message


# --- one sentence: values ---

_TOO_LARGE = 1 << 21


@pytest.mark.parametrize(
    ("sections", "pieces"),
    [
        # types
        ({"model": {"num_experts": "4"}}, ["model.num_experts must be an integer, got '4'", "write 4 without quotes"]),
        ({"model": {"hidden": True}}, ["model.hidden must be an integer, got true"]),
        ({"model": {"hidden": 256.0}}, ["model.hidden must be an integer, got 256.0", "write 256"]),
        ({"model": {"hidden": 256.5}}, ["model.hidden must be an integer, got 256.5"]),
        ({"model": {"hidden": None}}, ["model.hidden must be an integer, got null"]),
        ({"model": {"hidden": [256]}}, ["model.hidden must be an integer, got [256]"]),
        ({"model": {"vocab_size": "x"}}, ["model.vocab_size must be an integer or null, got 'x'"]),
        ({"model": {"expert_bias": 1}}, ["model.expert_bias must be true or false, got 1", "write true"]),
        ({"model": {"expert_bias": "yes"}}, ["model.expert_bias must be true or false, got 'yes'", "write true"]),
        ({"model": {"activation": 3}}, ["model.activation must be one of silu, swiglu_clamp, swiglu_oai, got 3"]),
        ({"router": {"scale": True}}, ["router.scale must be a number, got true"]),
        ({"router": {"scale": "2.5"}}, ["router.scale must be a number, got '2.5'", "write 2.5 without quotes"]),
        ({"router": {"scale": float("nan")}}, ["router.scale must be a finite number, got nan"]),
        ({"router": {"scale": float("inf")}}, ["router.scale must be a finite number, got inf"]),
        ({"router": {"scale": 10**400}}, ["router.scale must be a finite number"]),
        # sizes
        ({"model": {"hidden": 0}}, ["model.hidden must be at least 1, got 0"]),
        ({"model": {"hidden": _TOO_LARGE}}, ["model.hidden must be at most 1048576", str(_TOO_LARGE)]),
        ({"model": {"hidden": 10**100}}, ["model.hidden must be at most 1048576"]),
        ({"model": {"num_experts": 1025}}, ["model.num_experts must be at most 1024, got 1025"]),
        ({"model": {"top_k": 17}}, ["model.top_k must be at most 16, got 17"]),
        ({"model": {"num_experts": 4, "top_k": 5}}, ["model.top_k=5", "model.num_experts=4", "use at most 4"]),
        ({"parallel": {"timeout_s": 0}}, ["parallel.timeout_s must be greater than 0.0, got 0.0"]),
        ({"parallel": {"max_tokens_per_rank": 0}}, ["parallel.max_tokens_per_rank must be at least 1"]),
        ({"router": {"aux_loss": -1}}, ["router.aux_loss must be at least 0.0, got -1.0"]),
        ({"launch": {"seed": -1}}, ["launch.seed must be at least 0, got -1"]),
        # words
        ({"model": {"activation": "situ"}}, ["silu, swiglu_clamp, swiglu_oai, got 'situ'", "did you mean 'silu'?"]),
        ({"model": {"dtype": "float16"}}, ["model.dtype must be one of bfloat16, float32, got 'float16'"]),
        ({"router": {"score": "softmx"}}, ["router.score must be one of", "did you mean 'softmax'?"]),
        ({"quantization": {"weights": "MXFP4"}}, ["quantization.weights", "got 'MXFP4'", "did you mean 'mxfp4'?"]),
        ({"kernel": {"backend": "sm100"}}, ["kernel.backend must be one of auto, sm90, cpu, reference", "'sm90'?"]),
        ({"parallel": {"overflow": "drop"}}, ["parallel.overflow must be one of chunk, error, got 'drop'"]),
        ({"launch": {"job": "trian"}}, ["launch.job must be one of infer, train, script", "did you mean 'train'?"]),
        # what does not fit together
        (
            {"model": {"num_experts": 10}},
            ["model.num_experts=10 is not divisible by parallel.expert_parallel_size=4", "valid sizes are 1, 2, 5, 10"],
        ),
        ({"router": {"groups": 5}}, ["router.groups=5", "model.num_experts=32", "nearest valid value is 4"]),
        ({"router": {"topk_groups": 2}}, ["router.topk_groups=2 must not exceed router.groups=1", "use at most 1"]),
        (
            {"router": {"groups": 16, "topk_groups": 1}},
            ["model.top_k=4 exceeds the 2 experts", "router.topk_groups=1", "use at least router.topk_groups=2"],
        ),
        (
            {"router": {"groups": 32, "topk_groups": 8}},
            ["router.group_reduce=top2 needs at least 2 experts", "use router.group_reduce=max"],
        ),
        (
            {"model": {"swiglu_limit": 10}},
            ["model.swiglu_limit=10.0", "model.activation=silu", "use model.activation=swiglu_clamp"],
        ),
        ({"model": {"swiglu_alpha": 1.0}}, ["model.swiglu_alpha=1.0", "use model.activation=swiglu_oai"]),
        ({"router": {"select": "hash"}}, ["router.select=hash needs model.vocab_size"]),
        (
            {"model": {"hidden": 200}, "quantization": {"weights": "mxfp4"}},
            ["model.hidden=200 must be divisible by 32", "quantization.weights=mxfp4", "nearest valid value is 192"],
        ),
        (
            {"model": {"intermediate": 8}, "quantization": {"weights": "mxfp4"}},
            ["model.intermediate=8 must be divisible by 32", "nearest valid value is 32"],
        ),
        (
            {"quantization": {"weights": "mxfp4"}, "launch": {"job": "train"}},
            ["launch.job=train needs quantization.weights=none, got mxfp4", "set quantization.weights=none"],
        ),
        ({"model": {"shared_gate": True}}, ["model.shared_gate needs model.shared_experts >= 1"]),
        ({"model": {"shared_intermediate": 8}}, ["model.shared_intermediate needs model.shared_experts >= 1"]),
        ({"parallel": {"comm": "local"}}, ["parallel.comm=local holds one rank", "use parallel.comm=auto"]),
        ({"launch": {"nproc": 6}}, ["launch.nproc=6", "multiple of parallel.expert_parallel_size=4", "launch.nproc=4"]),
        ({"launch": {"nproc": 3, "nnodes": 2}}, ["is 6 ranks", "use launch.nproc=2"]),
        ({"launch": {"nnodes": 3}}, ["launch.nnodes=3 does not divide", "set launch.nproc"]),
        (
            {"parallel": {"overflow": "error", "max_tokens_per_rank": 100}},
            ["launch.batch_tokens=512 exceeds parallel.max_tokens_per_rank=100", "use at most 100"],
        ),
        ({"indexer": {"heads": 4, "head_dim": 7, "top_k": 2}}, ["indexer.head_dim=7 must be even", "value is 8"]),
        ({"indexer": {"heads": 4}}, ["indexer.head_dim is missing", "needs heads, head_dim, top_k"]),
        ({"indexer": {**INDEXER, "head_dim": 48, "hadamard": True}}, ["a power of two", "nearest valid value is 32"]),
        ({"indexer": {**INDEXER, "head_dim": 56, "hadamard": True}}, ["nearest valid value is 64"]),
        (
            {"indexer": {**INDEXER, "quantization": "fp8"}},
            ["indexer.heads=4 must be one of 8, 16, 32, 64 with indexer.quantization=fp8"],
        ),
        (
            {"indexer": {**INDEXER, "heads": 8, "head_dim": 96, "quantization": "mxfp4"}},
            ["indexer.head_dim=96 must be one of 32, 64, 128 with indexer.quantization=mxfp4"],
        ),
        (
            {"indexer": {**INDEXER, "heads": 8, "quantization": "fp8"}, "attention": {**MLA, "page_size": 48}},
            ["attention.page_size=48 must be one of 16, 32, 64, 128, 256 with indexer.quantization=fp8"],
        ),
        ({"indexer": {**INDEXER, "heads": 8, "quantization": "fp8", "train": True}}, ["set indexer.quantization=none"]),
        ({"attention": MLA}, ["section 'attention' needs section 'indexer'", "add it"]),
        (
            {"indexer": INDEXER, "attention": {**MLA, "rope_dim": 66}},
            ["attention.rope_dim=66 must not exceed indexer.head_dim=64", "use at most 64"],
        ),
        ({"indexer": INDEXER, "attention": {**MLA, "rope_dim": 7}}, ["attention.rope_dim=7 must be even"]),
        (
            {"indexer": INDEXER, "attention": {**MLA, "kv_lora": None}},
            ["attention.kv_lora is missing", "attention.kind=mla needs kv_lora, nope_dim, value_dim"],
        ),
        (
            {"indexer": INDEXER, "attention": {**MLA, "window": 8}},
            ["attention.window=8 has no meaning with attention.kind=mla", "leave it out"],
        ),
        (
            {"indexer": INDEXER, "attention": {**GQA, "kv_heads": 3}},
            ["attention.kv_heads=3 does not divide attention.heads=4", "valid values are 1, 2, 4"],
        ),
        (
            {"indexer": INDEXER, "attention": {**GQA, "rope_dim": 16}},
            ["attention.rope_dim=16 must not exceed attention.head_dim=12"],
        ),
        (
            {"indexer": INDEXER, "attention": {**MLA, "yarn_slow": 32}},
            ["attention.yarn_slow=32 must be below attention.yarn_fast=32"],
        ),
        (
            {"indexer": {**INDEXER, "rope": "half"}, "attention": COMPRESSED},
            ["indexer.rope=half does not go with attention.kind=compressed", "use indexer.rope=interleaved"],
        ),
        (
            {"indexer": INDEXER, "attention": {**COMPRESSED, "rope": "half"}},
            ["attention.rope=half has no meaning with attention.kind=compressed"],
        ),
        (
            {"indexer": {**INDEXER, "train": True}, "attention": COMPRESSED},
            ["indexer.train=true does not go with attention.kind=compressed", "use indexer.train=false"],
        ),
        (
            {"indexer": INDEXER, "attention": {**MLA, "q_lora_rank": 8}},
            ["unknown key 'q_lora_rank' in section 'attention'", "did you mean 'q_lora'?"],
        ),
    ],
)
def test_wrong_values(sections: dict[str, dict[str, Any]], pieces: list[str]) -> None:
    message = sentence(lambda: MoEConfig.from_dict(data(**sections), source="some.yaml"))
    assert message.startswith("some.yaml: ")
    for piece in pieces:
        assert piece in message, message


def test_the_same_values_without_the_mistake_are_valid() -> None:
    # Guards the table above: its base must be valid, so that each case fails for its own reason.
    MoEConfig.from_dict(data())
    MoEConfig.from_dict(data(router={"groups": 32, "topk_groups": 8, "group_reduce": "max"}))
    MoEConfig.from_dict(data(router={"groups": 16, "topk_groups": 2}))
    MoEConfig.from_dict(data(router={"select": "hash"}, model={"vocab_size": 100}))
    MoEConfig.from_dict(data(parallel={"overflow": "error", "max_tokens_per_rank": 512}))
    MoEConfig.from_dict(data(parallel={"comm": "local", "expert_parallel_size": 1}))
    for attention in (MLA, GQA, COMPRESSED):
        MoEConfig.from_dict(data(indexer=INDEXER, attention=attention))
    MoEConfig.from_dict(data(model={"hidden": 200}, quantization={"weights": "fp8_block"}))


# --- one sentence: text ---


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("model: {hidden: 1\nrouter: 2\n", ["not valid YAML at line 2"]),
        ("model:\n\t hidden: 1\n", ["not valid YAML at line 2"]),
        (BASE + "router: {score: sigmoid}\n", ["not valid YAML at line 4", "the key 'router' stands twice"]),
        ("model:\n  hidden: 1\n  top_k: 1\n  hidden: 2\n", ["at line 4", "the key 'hidden' stands twice"]),
        ("model: {hidden: 1, 'hidden': 2}\n", ["at line 1", "the key 'hidden' stands twice"]),
        ("model: !!python/object/apply:os.getcwd []\n", ["at line 1", "the tag '!!python", "is not allowed"]),
        ("model: {4: 5}\n", ["at line 1", "a key must be a plain word"]),
        ("model: {[1, 2]: 5}\n", ["at line 1", "a key must be a plain word"]),
        ("a: 1\n---\nb: 2\n", ["not valid YAML at line 2"]),
        ("model: *nobody\n", ["not valid YAML at line 1", "nobody"]),
        ("model: {hidden: 1}\nrouter: \x07\n", ["not valid YAML at line 2"]),
        ("model: " + "[" * 4000, ["not valid YAML"]),
        ("model: {hidden: " + "9" * 5000 + "}", []),  # Python < 3.10.7 reads it, and the size is refused
    ],
)
def test_broken_yaml(write: Writer, text: str, pieces: list[str]) -> None:
    path = write(text)
    message = sentence(lambda: MoEConfig.from_yaml(path))
    for piece in [f"{path}: ", *pieces]:
        assert piece in message, message


@pytest.mark.parametrize(
    ("value", "kept"), [("yes", "'yes'"), ("2001-12-14", "'2001-12-14'"), ("0o17", "'0o17'"), ("010", "'010'")]
)
def test_yaml_1_1_surprises_stay_text(write: Writer, value: str, kept: str) -> None:
    path = write(BASE.replace("hidden: 256", f"hidden: {value}"))
    assert f"model.hidden must be an integer, got {kept}" in sentence(lambda: MoEConfig.from_yaml(path))


def test_an_expanding_alias_is_cheap_to_refuse(write: Writer) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 30)]
    assert "unknown section 'a0'" in sentence(lambda: MoEConfig.from_yaml(write("\n".join(lines))))
    itself = BASE.replace("hidden: 256", "hidden: &h [*h]")
    assert "model.hidden must be an integer, got [[[" in sentence(lambda: MoEConfig.from_yaml(write(itself)))


def test_files(tmp_path: Path) -> None:
    missing = tmp_path / "quickstrat.yaml"
    message = sentence(lambda: MoEConfig.from_yaml(missing))
    assert message.startswith(f"{missing}: no such file or preset; did you mean 'quickstart'")
    assert "deepseek_v3" in message and "mixtral_8x7b" in message
    assert "the presets are" in sentence(lambda: MoEConfig.from_yaml("zzzzzz"))
    assert "not a regular file" in sentence(lambda: MoEConfig.from_yaml(tmp_path))
    (tmp_path / "latin.yaml").write_bytes(b"model: {hidden: \xff}\n")
    assert "must be UTF-8" in sentence(lambda: MoEConfig.from_yaml(tmp_path / "latin.yaml"))
    assert "cannot be read" in sentence(lambda: MoEConfig.from_yaml("a" * 5000))
    sentence(lambda: MoEConfig.from_yaml("a\0b"))
    sentence(lambda: MoEConfig.from_yaml("a\nb"))
    (tmp_path / "bom.yaml").write_bytes(b"\xef\xbb\xbf" + BASE.encode())
    assert MoEConfig.from_yaml(tmp_path / "bom.yaml").model.hidden == 256


# --- MoESpec without YAML ---


@pytest.mark.parametrize(
    ("changes", "pieces"),
    [
        ({"activation": "situ"}, ["MoESpec.activation must be one of silu, swiglu_clamp, swiglu_oai", "'silu'?"]),
        ({"weight_format": "mxfp4", "hidden": 100}, ["MoESpec.hidden=100", "divisible by 32", "value is 96"]),
        ({"top_k": 33}, ["MoESpec.top_k must be at most 16"]),
        ({"top_k": 9, "num_experts": 8}, ["MoESpec.top_k=9", "MoESpec.num_experts=8", "use at most 8"]),
        ({"num_experts": 1025}, ["MoESpec.num_experts must be at most 1024"]),
        ({"swiglu_limit": 7.0}, ["MoESpec.swiglu_limit=7.0", "use MoESpec.activation=swiglu_clamp"]),
        ({"act_scale": "token"}, ["MoESpec.act_scale=token", "MoESpec.weight_format=none", "use none"]),
        ({"act_scale": "none", "weight_format": "mxfp4"}, ["MoESpec.act_scale=none", "use token"]),
        ({"hidden": "256"}, ["MoESpec.hidden must be an integer, got '256'"]),
    ],
)
def test_spec_checks_itself(changes: dict[str, Any], pieces: list[str]) -> None:
    base: dict[str, Any] = {"hidden": 256, "intermediate": 512, "num_experts": 32, "top_k": 4}
    MoESpec(**base)
    message = sentence(lambda: MoESpec(**{**base, **changes}))
    for piece in pieces:
        assert piece in message, message


def test_configuration_without_yaml() -> None:
    model = ModelConfig(hidden=64, intermediate=32, num_experts=8, top_k=2)
    config = MoEConfig(model=model, router=RouterConfig(score="sigmoid"))
    assert config.spec.num_experts == 8 and config.source == "<python>"
    message = sentence(
        lambda: MoEConfig(model=dataclasses.replace(model, top_k=9), router=RouterConfig(score="sigmoid"))
    )
    assert "model.top_k=9 must not exceed model.num_experts=8" in message
    assert "quantization.weights" in sentence(lambda: QuantizationConfig(weights="fp4"))
