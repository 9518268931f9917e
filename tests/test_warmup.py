"""`megamoe warmup`: every kernel of a configuration in the cache, what each takes, and when it is not 0."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from helpers_launch import megamoe

pytest.importorskip("torch")
pytest.importorskip("cuda.core", reason="cuda.core with NVRTC is not installed (megamoe[cuda13])")
pytest.importorskip("cuda.bindings.nvrtc", reason="cuda.core with NVRTC is not installed (megamoe[cuda13])")

from megamoe.cli import main  # noqa: E402
from megamoe.config import MoEConfig  # noqa: E402
from megamoe.kernels import warmup  # noqa: E402
from megamoe.kernels.jit import KernelSource  # noqa: E402

CLEAN = """
extern "C" __global__ void scale(float* x, float factor, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] *= factor;
}
"""
LOCAL = """
extern "C" __global__ void gather(float* x, int n) {
    float a[64];
    for (int i = 0; i < n; ++i) a[(i * 7 + n) % 64] = x[i];
    for (int i = 0; i < n; ++i) x[i] = a[(n + i * 3) % 64];
}
"""
_ROW = re.compile(r"(\w+) +│ +(\d+) │ +(\d+) B │ +(\d+) B │ +(\d+) B │ +(cached|[\d.]+ s)")


def rows(text: str) -> dict[str, tuple[str, ...]]:
    return {match[0]: match[1:] for match in _ROW.findall(text)}


@pytest.mark.parametrize("preset", ["deepseek_v3", "gpt_oss_120b"])
def test_every_kernel_is_compiled_once(preset: str, tmp_path: Path) -> None:
    first = megamoe("warmup", preset, timeout=280.0, MEGAMOE_CACHE_DIR=str(tmp_path))  # compiles for a minute
    assert first.returncode == 0, first.stdout + first.stderr
    sources = warmup.warmup_sources(MoEConfig.from_yaml(preset))
    table = rows(first.stdout)
    assert list(table) == [source.name for source in sources]
    for source in sources:
        registers, shared, spills, local, compiled = table[source.name]
        assert 0 < int(registers) <= 255 and int(shared) >= source.dynamic_shared_bytes
        assert (spills, local) == ("0", "0") and compiled != "cached"
    assert len(list(tmp_path.glob("*/*.cubin"))) == len(sources)
    again = megamoe("warmup", preset, "--arch", "sm_90a", MEGAMOE_CACHE_DIR=str(tmp_path))
    assert again.returncode == 0 and {row[-1] for row in rows(again.stdout).values()} == {"cached"}


def test_an_indexer_needs_its_quantisers_and_the_top_k() -> None:
    plain = MoEConfig.from_yaml("glm_5")
    names = {source.name for source in warmup.warmup_sources(plain)}
    without = {
        source.name for source in warmup.warmup_sources(dataclasses.replace(plain, indexer=None, attention=None))
    }
    added = names - without
    assert without and without < names
    assert {"indexer_quantize_bf16_d128_fp8", "sm90_topk_fp32_cluster1", "sm90_topk_bf16_cluster8_ordered"} <= added
    assert not any("_d64_" in name for name in added)


def test_local_memory_is_exit_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sources = [KernelSource("clean", CLEAN, "scale"), KernelSource("local", LOCAL, "gather")]
    monkeypatch.setattr(warmup, "warmup_sources", lambda config, arch: sources)
    monkeypatch.setenv("MEGAMOE_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("MEGAMOE_JIT_PTXAS_CHECK", "1")  # the table comes all the same
    assert main(["warmup", "quickstart"]) == 1
    said = capsys.readouterr()
    assert said.err.splitlines()[-1] == "megamoe warmup: spills or local memory in local"
    table = rows(said.out)
    assert table["clean"][3] == "0" and int(table["local"][3]) >= 256


def test_a_refused_kernel_shows_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = KernelSource("broken", CLEAN.replace("factor;", "undefined_thing;"), "scale")
    monkeypatch.setattr(warmup, "warmup_sources", lambda config, arch: [broken])
    monkeypatch.setenv("MEGAMOE_CACHE_DIR", str(tmp_path))
    assert main(["warmup", "quickstart"]) == 2
    said = capsys.readouterr().err
    assert "NVRTC refused kernel 'broken'" in said and "undefined_thing" in said and "Traceback" not in said


def test_nowhere_to_keep_them_is_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setattr(warmup, "warmup_sources", lambda config, arch: [KernelSource("clean", CLEAN, "scale")])
    monkeypatch.setenv("MEGAMOE_CACHE_DIR", str(file))
    monkeypatch.setattr("megamoe.launch.warmup.compile_all", lambda *_: pytest.fail("compiled for nobody"))
    assert main(["warmup", "quickstart"]) == 1
    assert f"no cache folder of {file} can be written; set MEGAMOE_CACHE_DIR" in capsys.readouterr().err


def test_a_cache_that_holds_them_all_need_not_be_writable(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(warmup, "warmup_sources", lambda config, arch: [KernelSource("clean", CLEAN, "scale")])
    monkeypatch.setenv("MEGAMOE_CACHE_DIR", str(tmp_path))
    assert main(["warmup", "quickstart"]) == 0
    monkeypatch.setattr("megamoe.kernels.jit.cache.CubinCache.can_write", lambda self: False)
    assert main(["warmup", "quickstart"]) == 0
    assert rows(capsys.readouterr().out)["clean"][-1] == "cached"


def test_weights_that_are_not_quantised_need_those_of_the_router_alone() -> None:
    sources = warmup.warmup_sources(MoEConfig.from_yaml("mixtral_8x7b"))
    assert [source.name for source in sources] == [
        "sm90_router_logits_fp32_t8_s2",
        "sm90_router_logits_fp32_t32_s2",
        "sm90_route_e8_top2_softmax",
    ]


def test_shared_experts_need_their_activation() -> None:
    config = MoEConfig.from_yaml("deepseek_v4_flash")
    assert "gated_rows_swiglu_clamp" in {source.name for source in warmup.warmup_sources(config)}
    without = MoEConfig.from_yaml("deepseek_v4_flash", ["model.shared_experts=0"])
    assert not any("gated_rows" in source.name for source in warmup.warmup_sources(without))


def test_no_kernels_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(warmup, "warmup_sources", lambda config, arch: [])
    assert main(["warmup", "quickstart"]) == 0
    assert "needs no kernels of ours" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments", [["quickstart", "--arch", "sm_80"], ["nowhere.yaml"], ["quickstart", "model.x=1"]]
)
def test_refusals_are_one_sentence(arguments: list[str]) -> None:
    done = megamoe("warmup", *arguments)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and done.stdout == "", done.stderr


def test_without_a_compiler_the_sentence_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MEGAMOE_JIT_COMPILER", "/nowhere/nvcc")
    assert main(["warmup", "deepseek_v3"]) == 2
    assert "no compiler '/nowhere/nvcc' found; unset it to use NVRTC" in capsys.readouterr().err
