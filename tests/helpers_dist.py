"""Run a function on N gloo ranks, each a process of its own, with a hard time limit and a word from every rank.

    results = run_ranks(4, "test_something:rank_function", {"key": "value"}, timeout_s=120)

The function is called as `function(rank, world_size, arguments)` after `init_process_group`; what it returns must be
plain data and tensors (it travels through a file that this module made). A file of the run's own folder is the
rendezvous, so that runs side by side need no ports. Whatever happens, no process survives the call.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

__all__ = ["RankFailure", "run_ranks"]

_TAIL_LINES = 40


class RankFailure(AssertionError):
    """A rank failed or ran out of time; the message holds the tail of every rank's output."""


def run_ranks(
    world_size: int,
    function: str,
    arguments: Any = None,
    *,
    timeout_s: float = 240.0,
    collective_timeout_s: float = 60.0,
    environment: dict[str, str] | None = None,
    may_die: tuple[int, ...] = (),
) -> list[Any]:
    """Start the ranks, wait for all of them, return what each returned.

    Args:
        world_size: number of processes.
        function: "module:name", importable from `tests/`.
        arguments: passed on to every rank.
        timeout_s: seconds for everything, start to end; past it all ranks are killed.
        collective_timeout_s: the default group's own timeout.
        environment: variables on top of this process's.
        may_die: ranks whose exit code does not matter; they return None.

    Raises:
        RankFailure: a rank exited with an error, or the time is up.
    """
    with tempfile.TemporaryDirectory(prefix="megamoe-ranks-") as folder:
        job = Path(folder) / "job"
        job.write_bytes(pickle.dumps((function, arguments, world_size, collective_timeout_s)))
        env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **(environment or {})}
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(world_size):
                with open(Path(folder) / f"log{rank}", "wb") as log:
                    processes.append(
                        subprocess.Popen(
                            [sys.executable, "-u", str(Path(__file__).resolve()), folder, str(rank)],
                            stdin=subprocess.DEVNULL,
                            stdout=log,
                            stderr=subprocess.STDOUT,
                            env=env,
                            cwd=os.getcwd(),
                            # a group of its own: whatever the rank starts is killed with it
                            start_new_session=True,
                        )
                    )
            problem = _wait(processes, timeout_s, may_die)
        finally:
            for process in processes:
                _kill(process)
        if problem is not None:
            raise RankFailure(f"{function} on {world_size} ranks: {problem}\n{_tails(Path(folder), world_size)}")
        return [_result(Path(folder), rank) for rank in range(world_size)]


def _wait(processes: list[subprocess.Popen[bytes]], timeout_s: float, may_die: tuple[int, ...]) -> str | None:
    deadline = time.monotonic() + timeout_s
    grace: float | None = None
    failed: str | None = None
    while True:
        codes = [process.poll() for process in processes]
        wrong = [rank for rank, code in enumerate(codes) if code not in (None, 0) and rank not in may_die]
        if all(code is not None for code in codes):
            return failed or (f"rank {wrong[0]} exited with {codes[wrong[0]]}" if wrong else None)
        now = time.monotonic()
        if wrong and grace is None:
            failed = f"rank {wrong[0]} exited with {codes[wrong[0]]}"
            # the others usually have something to say about it too
            grace = min(now + 5.0, deadline)
        if grace is not None and now > grace:
            return failed
        if now > deadline:
            late = [rank for rank, code in enumerate(codes) if code is None]
            return f"ranks {late} still ran after {timeout_s:g} s"
        time.sleep(0.02)


def _kill(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def _tails(folder: Path, world_size: int) -> str:
    parts = []
    for rank in range(world_size):
        lines = (folder / f"log{rank}").read_text(errors="replace").splitlines()[-_TAIL_LINES:]
        parts.append(f"--- rank {rank} ---\n" + "\n".join(lines))
    return "\n".join(parts)


def _result(folder: Path, rank: int) -> Any:
    path = folder / f"result{rank}"
    if not path.exists():
        return None
    import torch

    # torch's own format: plain pickle cannot read 8-bit floats back
    return torch.load(path, weights_only=False)


def _main(folder: Path, rank: int) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    function, arguments, world_size, collective_timeout_s = pickle.loads((folder / "job").read_bytes())
    module, name = function.split(":")
    run = getattr(import_module(module), name)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'rendezvous'}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=collective_timeout_s),
    )
    result = run(rank, world_size, arguments)
    torch.save(result, folder / f"result{rank}")
    # no barrier: a test may leave the group broken on purpose
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    _main(Path(sys.argv[1]), int(sys.argv[2]))
