"""The command line: what it refuses before anything starts, and in how many words."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from helpers_launch import QUICKSTART, ROOT, environment, megamoe

from megamoe.cli import main, parse
from megamoe.config import MoEConfig
from megamoe.launch.launcher import plan_launch


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run the command in this process and return its one sentence of refusal."""
    assert main(list(arguments)) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1, said.err
    return said.err


def test_a_misspelt_key_is_one_sentence_with_the_nearest_key(tmp_path: Path) -> None:
    path = tmp_path / "typo.yaml"
    path.write_text((ROOT / QUICKSTART).read_text().replace("num_experts", "num_expert"))
    done = megamoe("launch", str(path))
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and "Traceback" not in done.stderr
    assert str(path) in done.stderr and "num_expert" in done.stderr and "num_experts" in done.stderr


def test_a_missing_file_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert "nowhere.yaml" in refused(capsys, "launch", "nowhere.yaml")


def test_experts_that_do_not_split_are_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "launch", QUICKSTART, "model.num_experts=10", "parallel.expert_parallel_size=4")
    assert "model.num_experts=10" in said and "4" in said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--text", "nowhere.txt"], ["nowhere.txt", "No such file"]),
        (["--text", "/dev/null"], ["empty"]),
        (["--plot", "load.pdf"], [".png"]),
        (["--plot", "nowhere/load.png"], ["no folder"]),
        (["launch.job=script"], ["after `--`"]),
        (["--", "nowhere.py"], ["nowhere.py", "no such script"]),
        (["launch.job=infer", "--", "tests/test_cli.py"], ["leave one of the two out"]),
        (["--text", "README.md", "--", "tests/test_cli.py"], ["--text"]),
        (["launch.nnodes=2"], ["--rdzv-endpoint"]),
        (["--rdzv-endpoint", "host:1"], ["launch.nnodes > 1"]),
        (["launch.job=train", "quantization.weights=mxfp4"], ["quantization.weights=none"]),
        (["launch.nproc=6"], ["launch.nproc=6", "multiple"]),
        (["--inject-fault", "4"], ["--inject-fault"]),
    ],
    ids=lambda value: "_".join(value)[:40] if isinstance(value, list) else "",
)
def test_what_cannot_work_is_refused_before_the_start(
    capsys: pytest.CaptureFixture[str], arguments: list[str], words: list[str]
) -> None:
    said = refused(capsys, "launch", QUICKSTART, *arguments)
    assert all(word in said for word in words), said


@pytest.mark.parametrize("command", ["launch", "config", "warmup"])
def test_a_configuration_is_all_that_a_command_needs(command: str) -> None:
    done = megamoe(command)
    assert done.returncode == 2
    assert (
        done.stderr
        == f"megamoe {command}: the following arguments are required: CONFIG (see megamoe {command} --help)\n"
    )


def test_an_unknown_option_is_one_sentence() -> None:
    done = megamoe("launch", QUICKSTART, "--polt", "x.png")
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "--polt" in done.stderr


def test_a_plot_without_matplotlib_names_the_extra(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "from megamoe.cli import main\n"
        f"sys.exit(main(['launch', {QUICKSTART!r}, '--plot', {str(tmp_path / 'x.png')!r}]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert "pip install 'megamoe[plot]'" in done.stderr and done.stderr.count("\n") == 1
    assert not (tmp_path / "x.png").exists()


def test_dry_run_prints_the_torchrun_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", QUICKSTART, "launch.layers=3", "--dry-run", "--text", "README.md"]) == 0
    words = shlex.split(capsys.readouterr().out)
    assert "torch.distributed.run" in words and "--standalone" in words and "--nproc-per-node=4" in words
    assert words[words.index("megamoe.launch.worker") :] == [
        "megamoe.launch.worker", QUICKSTART, "launch.layers=3", "--text", "README.md",
    ]  # fmt: skip


def test_options_may_stand_between_overrides() -> None:
    options, script = parse(["launch", QUICKSTART, "--plot", "a.png", "launch.layers=3", "--", "x.py", "--", "--y"])
    assert options.overrides == ["launch.layers=3"] and options.plot == "a.png"
    assert script == ["x.py", "--", "--y"]


def test_several_nodes_meet_where_they_are_told() -> None:
    options, _ = parse(["launch", QUICKSTART, "launch.nnodes=2", "launch.nproc=2", "--rdzv-endpoint", "host:29400"])
    plan = plan_launch(options)
    assert "--standalone" not in plan.torchrun
    assert {"--nnodes=2", "--nproc-per-node=2", "--rdzv-endpoint=host:29400"} <= set(plan.torchrun)
    assert "GLOO_SOCKET_IFNAME" not in plan.environment


def test_planning_imports_no_torch() -> None:
    code = (
        "import sys\nfrom megamoe.cli import main\n"
        f"main(['launch', {QUICKSTART!r}, '--dry-run']); sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_python_m_is_the_same_command() -> None:
    command = [sys.executable, "-m", "megamoe.launch", QUICKSTART, "--dry-run"]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "megamoe.launch.worker" in done.stdout, done.stderr


def test_config_prints_a_report_and_refuses_in_one_sentence() -> None:
    done = megamoe("config", QUICKSTART, "model.top_k=2")
    assert done.returncode == 0 and "top_k" in done.stdout, done.stderr
    assert MoEConfig.from_yaml(ROOT / QUICKSTART).model.top_k != 2
    bad = megamoe("config", QUICKSTART, "model.top_k=none_of_it")
    assert bad.returncode == 2 and bad.stderr.count("\n") == 1 and bad.stdout == ""


def test_no_command_shows_the_help() -> None:
    done = megamoe()
    assert done.returncode == 2 and "megamoe launch CONFIG" in done.stdout
