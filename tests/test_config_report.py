"""`megamoe config`: the values in force, and bytes counted by hand."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest
from helpers_config import BASE, data

from megamoe.config import MoEConfig
from megamoe.config_report import resolved_report, run_config_command, sizes

ROOT = Path(__file__).resolve().parents[1]


def test_config_command_prints_or_returns_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, path = io.StringIO(), tmp_path / "case.yaml"
    path.write_text(BASE)
    assert run_config_command(path, ["quantization.weights=mxfp4"], out) == 0
    report = out.getvalue()
    for piece in ("hidden", "valid parallel.expert_parallel_size", "1, 2, 4, 8, 16, 32", "MiB", "Not counted"):
        assert piece in report
    assert run_config_command(path, ["model.hiden=3"], out) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert "did you mean 'model.hidden'?" in captured.err and out.getvalue() == report


def test_report_shows_every_key_and_the_value_in_force() -> None:
    sections = data(model={"shared_experts": 1}, quantization={"weights": "auto"}, launch={"nnodes": 2})
    config = MoEConfig.from_dict(sections)
    lines = resolved_report(config).splitlines()
    for section, keys in config.to_dict().items():
        for key in keys or {}:
            assert any(line.split()[:1] == [key] for line in lines), (section, key)
    words = {line.split()[0]: line.split()[1:] for line in lines if line.startswith("  ")}
    assert words["weights"][0] == "mxfp4" and "auto," in words["weights"]
    assert words["act_scale"][0] == "token" and words["nproc"][0] == "2" and words["shared_intermediate"][0] == "512"
    assert any(line.startswith("quantization.weights: auto is mxfp4") for line in lines)
    assert "indexer: none" in lines


def test_sizes_by_hand() -> None:
    hidden, intermediate, local = 256, 512, 8
    elements = local * 3 * hidden * intermediate
    plain = sizes(MoEConfig.from_dict(data(parallel={"max_tokens_per_rank": 100})))
    assert (plain.local_experts, plain.expert_parameters) == (local, elements)
    assert plain.expert_bytes == plain.packed_bytes == 2 * elements
    assert plain.replicated_parameters == 32 * hidden and plain.replicated_bytes == 4 * 32 * hidden
    assert plain.input_bytes == 100 * (2 * hidden + 4 * 8)
    assert plain.slot_bytes == 100 * 4 * hidden * 2
    assert (plain.balanced_rows, plain.worst_rows, plain.row_bytes) == (400, 1600, 2 * (hidden + intermediate))

    packed = sizes(MoEConfig.from_dict(data(quantization={"weights": "mxfp4"})))
    assert packed.packed_bytes == elements // 2 + elements // 32
    assert packed.row_bytes == hidden + 4 + intermediate + 4 * (intermediate // 128)

    short = data(model={"hidden": 200, "intermediate": 300, "expert_bias": True}, quantization={"weights": "fp8_block"})
    blocks = sizes(MoEConfig.from_dict(short))
    bias = 2 * 300 + 200
    assert blocks.packed_bytes == local * (3 * 200 * 300 + 4 * 3 * 2 * 3 + 2 * bias)
    assert blocks.expert_parameters == local * (3 * 200 * 300 + bias)
    assert blocks.row_bytes == 200 + 4 * 2 + 300 + 4 * 3

    wide = sizes(MoEConfig.from_dict(data(model={"dtype": "float32", "shared_experts": 2, "shared_gate": True})))
    assert wide.slot_bytes == 8192 * 4 * hidden * 4
    assert wide.replicated_parameters == 32 * hidden + 3 * hidden * 2 * intermediate + hidden
    hashed = data(model={"vocab_size": 1000}, router={"select": "hash"})
    assert sizes(MoEConfig.from_dict(hashed)).replicated_bytes == 4 * 32 * hidden + 8 * 1000 * 4


def test_neither_the_configuration_nor_its_report_imports_torch() -> None:
    code = (
        "import sys; from megamoe.config_report import run_config_command as run; assert run('quickstart') == 0; "
        "assert run('quickstrat') == 2; print([m for m in ('torch', 'numpy', 'rich') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "[]", done.stdout + done.stderr
    assert done.returncode == 0 and done.stderr.count("\n") == 1 and "Traceback" not in done.stderr
