"""The Hopper kernels under compute-sanitizer, where it is installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

RUN = Path(__file__).with_name("sanitize") / "gpu_gemm.py"


def _load() -> Any:
    spec = importlib.util.spec_from_file_location("sanitize_gpu_gemm", RUN)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


run = _load()


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("tool", run.TOOLS)
def test_sanitizer_is_silent(tool: str) -> None:
    sanitizer = run.find_sanitizer()
    if sanitizer is None:
        pytest.skip("compute-sanitizer was not found on PATH, in CUDA_HOME or in /usr/local/cuda")
    code, output = run.run_tool(sanitizer, tool)
    assert code == 0, output[-12000:]


def test_without_the_tool_the_script_says_that_it_checked_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "find_sanitizer", lambda: None)
    assert run.main(["all"]) == 0
    assert capsys.readouterr().out.startswith("SKIPPED: compute-sanitizer was not found")


def test_what_a_tool_finds_fails_the_script(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    fake = tmp_path / "compute-sanitizer"
    fake.write_text('#!/bin/sh\necho "Invalid __global__ read"\necho "ERROR SUMMARY: 1 error"\nexit 66\n')
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert run.find_sanitizer() == str(fake)
    assert run.main(["memcheck"]) == 1
    assert "Invalid __global__ read" in capsys.readouterr().out
