"""The selector stays within the list of instances, and every instance compiles without spills or local memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from megamoe.config import MoEConfig
from megamoe.kernels.gemm_instances import all_instances, all_sources, select_instance
from megamoe.kernels.jit import JitSettings, build
from megamoe.kernels.warmup import warmup_sources

ROOT = Path(__file__).resolve().parents[1]
PRESETS = sorted(path.stem for path in (ROOT / "configs").glob("*.yaml"))
MAX_INSTANCES = 64
MAX_SHARED_BYTES = 227 * 1024


def test_there_are_eleven_presets() -> None:
    assert len(PRESETS) == 11


@pytest.mark.parametrize("preset", PRESETS)
def test_the_selector_stays_within_the_list(preset: str) -> None:
    config = MoEConfig.from_yaml(preset)
    known, chosen = set(all_instances()), set()
    experts = config.model.num_experts // config.parallel.expert_parallel_size
    buckets = [1 << i for i in range(18)]  # tokens that arrive at a rank, times the experts of each
    for tokens in buckets:
        hint = -(-tokens * config.model.top_k // experts)
        for n, k in (
            (2 * config.model.intermediate, config.model.hidden),
            (config.model.hidden, config.model.intermediate),
        ):
            assert n % 32 == 0 and k % 32 == 0, (n, k)
            for granularity in ("token", "block128"):
                for masked in (False, True):
                    chosen.add(select_instance("fp8", granularity, hint, masked))
                    for layout in (None, "sm90_rs", "sm90_ss"):
                        instance = select_instance("fp4", granularity, hint, masked, layout=layout)
                        assert layout in (None, instance.layout)
                        chosen.add(instance)
    assert chosen <= known
    assert len(known) == len(all_instances()) <= MAX_INSTANCES


def test_every_instance_can_be_chosen() -> None:
    chosen = {
        select_instance(weights, granularity, rows, False)
        for weights in ("fp4", "fp8")
        for granularity in ("token", "block128")
        for rows in range(1024)
    }
    assert chosen == set(all_instances())


@pytest.mark.parametrize(
    ("rows", "name"),
    [(0, "rs_8x"), (8, "rs_8x"), (9, "rs_16x"), (24, "rs_24x"), (32, "rs_32x"), (48, "rs_48x"), (49, "ss_128x256")]
    + [(199, "ss_128x256"), (200, "ss_256x128"), (100000, "ss_256x128")],
)
def test_fp4_follows_the_measurements(rows: int, name: str) -> None:
    assert name in select_instance("fp4", "token", rows, True).name


@pytest.mark.parametrize(
    ("arguments", "layout", "words"),
    [
        (("bf16", "token"), None, "format"),
        (("fp8", "row"), None, "granularity"),
        (("fp8", "token"), "sm90_ss", "layout"),
        (("fp4", "token"), "sm80", "layout"),
    ],
)
def test_refusals_name_the_rule(arguments: tuple[str, str], layout: str | None, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        select_instance(*arguments, 1, False, layout=layout)


def test_shared_memory_fits() -> None:
    for instance in all_instances():
        assert instance.shared_bytes(1024) <= MAX_SHARED_BYTES, instance


@pytest.mark.parametrize(("weights", "scale"), [("mxfp4", "token"), ("mxfp4", "block128"), ("fp8_block", "block128")])
def test_warmup_names_what_can_be_chosen(weights: str, scale: str) -> None:
    changes = [f"quantization.weights={weights}", f"quantization.act_scale={scale}"]
    config = MoEConfig.from_yaml("deepseek_v3", changes)
    names = [source.name for source in warmup_sources(config)]
    assert len(set(names)) == len(names) <= MAX_INSTANCES
    for granularity in {scale, "block128"}:
        for rows in range(1, 300):
            chosen = select_instance("fp4" if weights == "mxfp4" else "fp8", granularity, rows, False)
            assert chosen.name in names
    plain = warmup_sources(MoEConfig.from_yaml("deepseek_v3", ["quantization.weights=none"]))
    assert not any("gemm" in source.name or "mega" in source.name or "quantize" in source.name for source in plain)


@pytest.mark.parametrize("source", all_sources(), ids=lambda source: source.name)
def test_compiles_without_spills(source, tmp_path: Path) -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="cuda.core with NVRTC is not installed (megamoe[cuda13])")
    usage = build(source, JitSettings(cache_dirs=(tmp_path,))).usage
    assert usage.is_clean and not usage.serialized, usage
