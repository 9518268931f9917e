"""What the GEMM benchmark makes of its figures: lines, verdicts, result file, plot. The figures need a GPU."""

from __future__ import annotations

import importlib
import json
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "gemm-h200.json"


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    yield
    for name in ("gemm", "gemm_lines", "gemm_plot", "gpu_timing", "result_file"):
        sys.modules.pop(name, None)


def row(case: str, method: str = "chilled", **values: float) -> dict[str, Any]:
    return {"case": case, "method": method, **values}


def test_every_line_is_of_a_case_that_is_measured() -> None:
    import gemm
    import gemm_lines

    names = {gemm.case_name(*parts) for parts in gemm.cases()}
    assert len(names) == len(gemm.cases())
    for line in gemm_lines.LINES:
        assert line.case in names or line.case == gemm_lines.ANY, line
        assert not line.of or line.of in names, line


def test_lines_scale_by_five_percent_at_most() -> None:
    import gemm_lines

    rate, stream = gemm_lines.LINES[0], next(line for line in gemm_lines.LINES if line.quantity == "us")
    rows = [row(rate.case, tflops=1150.0, us=1.0), row(stream.case, us=90.0, tflops=1.0)]

    def needed(cublaslt: float, copy: float) -> list[tuple[float, bool]]:
        found = gemm_lines.verdicts(rows, cublaslt, copy)
        return [(round(float(str(v["needed"])), 3), bool(v["met"])) for v in found]

    assert needed(1408, 4257) == [(1150.0, True), (90.0, True)]
    assert needed(1408 * 1.02, 4257 * 1.02) == [(1173.0, False), (round(90 / 1.02, 3), False)]
    assert needed(1408 * 2, 4257 * 2) == [(1207.5, False), (round(90 / 1.05, 3), False)]
    assert needed(1408 / 2, 4257 / 2) == [(1092.5, True), (round(90 / 0.95, 3), True)]


def test_ratios_and_the_largest_host_cost(capsys: pytest.CaptureFixture[str]) -> None:
    import gemm_lines

    ratio = next(line for line in gemm_lines.LINES if line.of)
    rows = [row(ratio.case, tflops=900.0, us=1.0), row(ratio.of, tflops=1001.0, us=1.0)]
    rows += [row("a", "host", us=9.0), row("b", "host", us=10.5)]
    found = {str(v["line"]): v for v in gemm_lines.verdicts(rows, 1408 * 2, 4257 * 2)}
    uneven = found[f"{ratio.case}, rate of that of even rows"]
    assert uneven["measured"] == pytest.approx(900 / 1001) and not uneven["met"] and uneven["needed"] == 0.9
    host = found["host cost of a call, the largest of all cases, us"]
    assert host["measured"] == 10.5 and host["needed"] == 10 and not host["met"]
    gemm_lines.say(list(found.values()))
    assert "MISSED host cost of a call, the largest of all cases, us: 10.5, needed 10\n" in capsys.readouterr().out
    # a run of some cases speaks of these only, but of the case that a ratio needs as well
    assert gemm_lines.verdicts(rows[:1], 1408, 4257) == []


def test_the_run_writes_its_commit_and_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import result_file

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "GPU")
    monkeypatch.setattr(sys, "argv", ["/somewhere/gemm.py", "--only", "two words"])
    monkeypatch.setenv("MEGAMOE_COMMIT", "abc1234")
    target = tmp_path / "folder" / "gemm.json"
    result_file.write(target, [row("a", us=1.0)], lines=[])
    data = json.loads(target.read_text())
    assert data["commit"] == "abc1234" and data["command"] == "python benchmarks/gemm.py --only 'two words'"
    assert list(data) == ["gpu", "driver", "cuda", "torch", "commit", "date", "command", "rows", "lines"]


def test_without_the_variable_git_is_asked_and_without_both_nothing_is_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import result_file

    monkeypatch.delenv("MEGAMOE_COMMIT", raising=False)
    monkeypatch.setattr(result_file, "ROOT", tmp_path)
    with pytest.raises(SystemExit, match="set MEGAMOE_COMMIT or run in a git checkout"):
        result_file.commit()
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "first"]):
        subprocess.run([*git, *command], cwd=tmp_path, check=True, timeout=30)
    (tmp_path / "a").write_text("")
    subprocess.run([*git, "add", "a"], cwd=tmp_path, check=True, timeout=30)
    assert result_file.commit().endswith("-dirty")
    subprocess.run([*git, "commit", "-q", "-m", "second"], cwd=tmp_path, check=True, timeout=30)
    head = subprocess.run([*git, "rev-parse", "HEAD"], cwd=tmp_path, check=True, timeout=30, capture_output=True)
    assert head.stdout.decode().startswith(result_file.commit())


def test_the_plot_has_a_bar_for_every_figure(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    import gemm_plot

    data = json.loads(RESULTS.read_text())
    cases = {entry["case"] for entry in data["rows"] if "error" in entry}
    first = next(entry for entry in data["rows"] if "error" in entry and entry["method"] == "chilled")
    first["peer"], first["peer_us"] = "deep_gemm", 2 * first["us"]
    axes = gemm_plot.figure(data).axes[0]
    peers = [entry for entry in data["rows"] if entry["method"] == "chilled" and entry.get("peer_us")]
    assert len(axes.patches) == 2 * len(cases) + len(peers) and len(axes.get_xticks()) == len(cases)
    assert axes.patches[2 * len(cases)].get_height() == pytest.approx(first["tflops"] / 2)
    gemm_plot.save(RESULTS, tmp_path / "gemm.png")
    assert (tmp_path / "gemm.png").read_bytes().startswith(b"\x89PNG")
    dense = "kernel=fp8_gemm_nt m=8192 n=8192 k=8192 scale=block128"
    assert gemm_plot.label(dense) == "FP8 dense\nblock128\n8192\nn 8192 k 8192"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize(
    "name",
    ["gemm", "indexer_attention", "mega_moe", "mega_moe_lag", "mega_moe_unfused", "moe_layer", "mqa_logits", "topk"],
)
def test_without_a_gpu_a_benchmark_says_so(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One sentence, whatever would have come first; nothing is measured."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as ended:
        patch.setattr(sys, "argv", [f"{name}.py"])
        importlib.import_module(name).main()
    assert ended.value.code == 2
    assert "torch finds no CUDA device" in capsys.readouterr().err
    sys.modules.pop(name)


def test_the_table_of_memory_refuses_options(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["mega_moe_memory.py", "--tokens", "8"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "benchmarks" / "mega_moe_memory.py"), run_name="__main__")
    printed = capsys.readouterr()
    assert ended.value.code == 2 and not printed.out and "unrecognized arguments: --tokens 8" in printed.err
