"""The launcher as a real process: what it runs, and that nothing outlives it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers_launch import QUICKSTART, ROOT, SMALL, environment, launched, megamoe, processes, wait_for, workers

# Case C5 allows 30 s from a death to the launcher's exit with no process left.
GONE_S = 30.0

LOOP = """
import os, sys
import torch
import torch.distributed as dist
from megamoe import MoEConfig, MoELayer
dist.init_process_group("gloo")
config = MoEConfig.from_yaml(os.environ["MEGAMOE_CONFIG"])
layer = MoELayer(config, dist.group.WORLD)
with torch.no_grad():
    while True:
        layer(torch.randn(16, config.model.hidden, dtype=torch.bfloat16))
        open(sys.argv[1] + os.environ["RANK"], "w").close()
"""


@pytest.fixture
def loop(tmp_path: Path) -> list[str]:
    """Arguments of a job whose 4 ranks run a MoE layer without end; each leaves a file `alive<rank>` once it does."""
    script = tmp_path / "loop.py"
    script.write_text(LOOP)
    return [QUICKSTART, *SMALL, "--", str(script), str(tmp_path / "alive")]


def running(folder: Path) -> bool:
    return len(list(folder.glob("alive*"))) == 4


def test_a_script_gets_its_arguments_the_config_and_its_own_folder(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("WORD = 'found'\n")
    script = tmp_path / "show.py"
    script.write_text(
        "import os, sys, beside\n"
        "from megamoe import MoEConfig\n"
        "config = MoEConfig.from_yaml(os.environ['MEGAMOE_CONFIG'])\n"
        "launch = config.launch\n"
        "words = ['RANK', os.environ['RANK'], __name__, sys.argv[1:], beside.WORD, launch.layers, launch.job]\n"
        "sys.stdout.write(' '.join(map(str, words)) + '\\n')  # one write: print makes two, and ranks interleave\n"
    )
    done = megamoe("launch", QUICKSTART, "launch.layers=7", "launch.nproc=4", "--", str(script), "a", "--b=c")
    assert done.returncode == 0, done.stderr
    lines = sorted(line for line in done.stdout.splitlines() if line.startswith("RANK"))
    assert lines == [f"RANK {rank} __main__ ['a', '--b=c'] found 7 script" for rank in range(4)]


def test_a_failing_script_names_rank_and_code(tmp_path: Path) -> None:
    script = tmp_path / "fail.py"
    script.write_text("import os, sys, time\nif os.environ['RANK'] == '2': sys.exit(41)\ntime.sleep(600)\n")
    start = time.monotonic()
    done = megamoe("launch", QUICKSTART, "--", str(script))
    assert done.returncode == 41 and time.monotonic() - start < GONE_S
    assert done.stderr.splitlines() == ["megamoe launch: rank 2 ended with exit code 41; the other ranks were stopped"]
    assert not processes(str(tmp_path))


def test_a_killed_rank_ends_the_run(tmp_path: Path, loop: list[str]) -> None:
    with launched(loop, str(tmp_path)) as process:
        wait_for(lambda: running(tmp_path), 60, "four ranks exchanging")
        os.kill(workers(str(tmp_path))[2], signal.SIGKILL)
        took = wait_for(lambda: process.poll() is not None and not processes(str(tmp_path)), GONE_S, "the end")
        assert process.returncode == 1
        assert process.stderr is not None
        assert "rank 2 was killed by SIGKILL" in process.stderr.read()
        print(f"gone after {took:.1f} s")


@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM", "SIGINT"])
def test_no_rank_outlives_the_launcher(tmp_path: Path, loop: list[str], name: str) -> None:
    number = signal.Signals[name]
    with launched(loop, str(tmp_path)) as process:
        wait_for(lambda: running(tmp_path), 60, "four ranks exchanging")
        assert len(workers(str(tmp_path))) == 4
        process.send_signal(number)
        took = wait_for(lambda: process.poll() is not None and not processes(str(tmp_path)), GONE_S, "the end")
        assert process.returncode == (-number if name == "SIGKILL" else 128 + number)
        assert process.stderr is not None
        said = process.stderr.read()
        assert "Traceback" not in said
        if name != "SIGKILL":
            assert f"{name} received; all 4 ranks were stopped" in said
        print(f"gone after {took:.1f} s")


def test_the_watching_thread_stands_in_for_the_kernel(tmp_path: Path) -> None:
    """Where prctl is missing, a child still dies with its parent."""
    child = (
        "import time, pathlib, sys\n"
        "from megamoe.launch import guard\n"
        "guard._ask_kernel = lambda: False\n"
        "assert guard.die_with_parent() == 'thread'\n"
        f"pathlib.Path({str(tmp_path / 'up')!r}).touch(); time.sleep(600)\n"
    )
    parent = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}]).wait()"
    process = subprocess.Popen([sys.executable, "-c", parent], cwd=ROOT, env=environment())
    try:
        wait_for(lambda: (tmp_path / "up").exists(), 30, "the child")
        process.kill()
        process.wait(timeout=10)
        wait_for(lambda: not processes(str(tmp_path)), 10, "the child's end")
    finally:
        process.kill()
        for pid in processes(str(tmp_path)):
            os.kill(pid, signal.SIGKILL)


def test_a_worker_whose_launcher_died_before_it_looked_stops(tmp_path: Path) -> None:
    touch = f"open({str(tmp_path / 'x')!r}, 'w')"
    code = f"from megamoe.launch.guard import die_with_parent; die_with_parent(1 << 22); {touch}"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1 and "launcher is gone" in done.stderr
    assert not (tmp_path / "x").exists()


@pytest.mark.slow
def test_infer_checks_every_token_and_draws_the_load(tmp_path: Path) -> None:
    plot = tmp_path / "load.png"
    done = megamoe("launch", QUICKSTART, "--plot", str(plot), timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "max error" in done.stdout and "within tolerance" in done.stdout
    rows = [line.split() for line in done.stdout.splitlines() if line.strip().endswith(("ok \u2502", "FAILED \u2502"))]
    assert len(rows) == 4
    tokens, received = (sum(int(row[column]) for row in rows) for column in (3, 5))
    assert received == tokens * 4 * 2, "top 4 in 2 layers"
    loads = [int(number) for number in re.findall(r"expert +\d+ +rank +\d+ +(\d+)", done.stdout)]
    assert len(loads) == 32 and sum(loads) == received
    assert plot.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert not processes(str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["mxfp4", "fp8_block", "none"])
def test_one_weight_times_8_is_found_and_named(weights: str) -> None:
    """The check can fail: one element of w2 on one rank, changed after the oracle took its copy."""
    done = megamoe("launch", QUICKSTART, f"quantization.weights={weights}", "--inject-fault", "2", timeout=150)
    assert done.returncode == 1, done.stdout + done.stderr
    fault = re.search(r"fault injected in layer 0, rank 2, expert (\d+): w2\[\d+, \d+\] times 8", done.stdout)
    assert fault, done.stdout
    verdict = next(line for line in done.stdout.splitlines() if line.startswith("infer: FAILED in layer 0"))
    assert re.search(r"token \d+ of rank \d \(byte \d+", verdict), verdict
    assert f"expert {fault[1]} on rank 2 is at fault" in verdict, verdict
    assert "OUT OF TOLERANCE" in done.stdout and "Traceback" not in done.stderr


@pytest.mark.slow
def test_ranks_without_text_take_part(tmp_path: Path) -> None:
    text = tmp_path / "two.txt"
    text.write_bytes(b"ab")
    done = megamoe("launch", QUICKSTART, *SMALL, "--text", str(text))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 of 2 bytes" in done.stdout and "within tolerance" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        ["launch.nproc=4", "parallel.expert_parallel_size=2", "model.dtype=float32", "quantization.weights=none"],
        ["launch.nproc=1", "parallel.expert_parallel_size=1", "router.score=sigmoid", "router.bias=true"],
        ["router.score=topk_softmax", "router.logit_bias=true", "model.expert_bias=true", "model.shared_gate=true",
         "model.activation=swiglu_oai", "model.swiglu_limit=7.0"],
        ["router.select=hash", "model.vocab_size=256", "router.score=sqrtsoftplus", "model.weight_position=before",
         "model.activation=swiglu_clamp", "model.swiglu_limit=10.0", "router.scale=1.5"],
    ],
    ids=["two_groups", "one_rank", "gpt_oss_like", "hash"],
)  # fmt: skip
def test_infer_agrees_with_the_oracle_for_other_layers(overrides: list[str]) -> None:
    done = megamoe("launch", QUICKSTART, *SMALL, *overrides)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "within tolerance" in done.stdout


@pytest.mark.slow
def test_two_launches_at_once_do_not_meet(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes((ROOT / "launch/sample.txt").read_bytes()[:400])
    arguments = [QUICKSTART, *SMALL, "--text", str(text)]
    with launched(arguments, str(tmp_path)) as first, launched(arguments, str(tmp_path)) as second:
        for process in (first, second):
            out, err = process.communicate(timeout=120)
            assert process.returncode == 0, out + err
            assert "within tolerance" in out


def test_an_unavailable_backend_is_one_sentence_from_the_ranks() -> None:
    done = megamoe("launch", QUICKSTART, *SMALL, "kernel.backend=sm90")
    assert done.returncode == 2
    assert "sm90 cannot run here" in done.stderr and "Traceback" not in done.stderr
