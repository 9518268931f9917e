"""Start the launcher as a real process, watch its ranks through /proc, and never leave one behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
QUICKSTART = "configs/quickstart.yaml"

# The quickstart's layer, shrunk so that a run is mostly process start-up.
SMALL = ["model.hidden=64", "model.intermediate=64", "model.num_experts=8", "model.top_k=2", "launch.batch_tokens=24"]


def environment(**changes: str) -> dict[str, str]:
    """Return the environment for a launcher under test: one thread per rank, the checkout importable."""
    variables = {key: value for key, value in os.environ.items() if not key.startswith(("MEGAMOE_", "TORCHELASTIC_"))}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        variables.pop(name, None)
    path = os.pathsep.join(p for p in (str(ROOT), os.environ.get("PYTHONPATH", "")) if p)
    return {**variables, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", **changes}


def megamoe(*arguments: str, timeout: float = 90.0, **changes: str) -> subprocess.CompletedProcess[str]:
    """Run `megamoe ...` to its end and return what it printed."""
    command = [sys.executable, "-m", "megamoe.cli", *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=environment(**changes), capture_output=True, text=True, timeout=timeout
    )


def processes(token: str) -> dict[int, str]:
    """Return the command line of every living process that has `token` in it, this one excepted."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if token in line:  # a zombie has an empty command line
            found[int(entry.name)] = line
    return found


def workers(token: str) -> dict[int, int]:
    """Return process id by rank of the workers of the run that has `token` in its command line."""
    ranks = {}
    for pid, line in processes(token).items():
        if "megamoe.launch.worker" not in line:
            continue
        try:
            variables = (Path("/proc") / str(pid) / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        ranks.update({int(v[5:]): pid for v in variables if v.startswith(b"RANK=")})
    return ranks


def wait_for(condition: Callable[[], bool], limit_s: float, what: str) -> float:
    """Wait until a condition holds; return the seconds it took."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < limit_s, f"{what}: not within {limit_s} s"
        time.sleep(0.05)
    return time.monotonic() - start


@contextmanager
def launched(arguments: Sequence[str], token: str) -> Iterator[subprocess.Popen[str]]:
    """Start `megamoe launch` in the background; kill whatever is left of it at the end.

    Args:
        arguments: of the launcher.
        token: a folder that the arguments name, by which the processes are found; temporary files go there too.
    """
    command = [sys.executable, "-m", "megamoe.cli", "launch", *arguments]
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment(TMPDIR=token), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        for pid in processes(token):
            os.kill(pid, signal.SIGKILL)
        process.kill()
        process.communicate(timeout=20)
