"""The Hopper kernels under compute-sanitizer, where it is installed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).with_name("sanitize")
sys.path.insert(0, str(FOLDER))

import compute_sanitizer as run  # noqa: E402
import gpu_gemm  # noqa: E402

UNORDERED = (
    "racecheck names refills of a ring's slot and the reads before them; mbarriers order the two, which it does not "
    "follow (benchmarks/notes/gemm-sm90.md)"
)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "tool"),
    [
        ("gpu_gemm.py", "memcheck"),
        pytest.param("gpu_gemm.py", "racecheck", marks=pytest.mark.xfail(reason=UNORDERED, strict=True)),
        ("gpu_mega.py", "memcheck"),
        ("gpu_mqa.py", "memcheck"),
        ("gpu_attention.py", "memcheck"),
        ("gpu_topk.py", "memcheck"),
        ("gpu_topk.py", "racecheck"),
        ("gpu_mega.py", "synccheck"),
        ("gpu_router.py", "memcheck"),
        ("gpu_router.py", "racecheck"),
        ("gpu_router.py", "synccheck"),
    ],
)
def test_sanitizer_is_silent(script: str, tool: str) -> None:
    sanitizer = run.find_sanitizer()
    if sanitizer is None:
        pytest.skip("compute-sanitizer was not found on PATH, in CUDA_HOME or in /usr/local/cuda")
    code, output = run.run_tool(FOLDER / script, sanitizer, tool)
    assert code == 0, output[-12000:]


def test_without_the_tool_the_script_says_that_it_checked_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "find_sanitizer", lambda: None)
    assert gpu_gemm.main(["all"]) == 0
    assert capsys.readouterr().out.startswith("SKIPPED: compute-sanitizer was not found")


def test_what_a_tool_finds_fails_the_script(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    fake = tmp_path / "compute-sanitizer"
    fake.write_text('#!/bin/sh\necho "Invalid __global__ read"\necho "ERROR SUMMARY: 1 error"\nexit 66\n')
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert run.find_sanitizer() == str(fake)
    assert gpu_gemm.main(["memcheck"]) == 1
    assert "Invalid __global__ read" in capsys.readouterr().out
