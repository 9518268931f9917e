"""What torchrun starts on every rank: ties itself to the launcher, runs the job, says errors in one line."""

from __future__ import annotations

import argparse
import atexit
import os
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from megamoe.errors import ConfigError, MegaMoeError, MegaMoETimeout
from megamoe.launch import exits
from megamoe.launch.guard import die_with_parent

__all__ = ["main"]

# What gloo and NCCL say when the process at the other end is gone.
_LOST_PEER = ("connection closed by peer", "connection reset", "broken pipe", "remote process exited", "socket timeout")


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="megamoe.launch.worker", description=__doc__)
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--text")
    parser.add_argument("--plot")
    parser.add_argument("--inject-fault", type=int)
    parser.add_argument("--launcher-pid", type=int)
    words = list(sys.argv[1:] if argv is None else argv)
    # everything after --script belongs to the script, a further "--" too
    cut = words.index("--script") if "--script" in words else len(words)
    options = parser.parse_args(words[:cut])
    options.script = words[cut + 1 :] or None
    return options


def _run_script(script: list[str]) -> None:
    """Run a user's script as `python script.py args` or `python -m module args` would; it sets up what it needs."""
    if script[0] == "-m":
        sys.argv = script[1:]
        runpy.run_module(script[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = list(script)
    sys.path[0] = str(Path(script[0]).resolve().parent)
    runpy.run_path(script[0], run_name="__main__")


def _run_job(options: argparse.Namespace) -> int:
    from megamoe.config import MoEConfig
    from megamoe.launch.runtime import Runtime
    from megamoe.launch.text import load_text

    config = MoEConfig.from_yaml(options.config, options.overrides)
    text = load_text(options.text)
    runtime = Runtime(config)
    if config.launch.job == "train":
        from megamoe.launch.job_train import run_train

        passed = run_train(config, runtime, text, plot=options.plot)
    else:
        from megamoe.launch.job_infer import run_infer

        passed = run_infer(config, runtime, text, plot=options.plot, faulty_rank=options.inject_fault)
    runtime.close()
    return 0 if passed else exits.FAILED


def _describe(error: Exception) -> tuple[int, str | None]:
    """Return the exit code for an error, and its sentence (None where only a traceback will do)."""
    text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if isinstance(error, ConfigError):
        return exits.REFUSED, text
    if isinstance(error, MegaMoETimeout):
        return exits.FAILED, text
    # An error that was put into words keeps the one of the transport as its cause.
    causes = f"{error} {error.__cause__ or ''}".lower()
    lost = isinstance(error, RuntimeError | OSError) and any(sign in causes for sign in _LOST_PEER)
    if isinstance(error, MegaMoeError):
        return exits.LOST_PEER if lost else exits.REFUSED, text
    if lost:
        return exits.LOST_PEER, "lost the connection to another rank"
    return exits.BROKEN, None


def main(argv: Sequence[str] | None = None) -> int:
    """Run one rank; returns its exit code."""
    options = _parse(argv)
    die_with_parent(options.launcher_pid)
    # A rank that waits inside a collective would notice a Python handler only when the wait ends.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if options.script is not None:
        _run_script(options.script)
        return 0
    try:
        return _run_job(options)
    except Exception as error:
        rank = os.environ.get("RANK", "?")
        code, sentence = _describe(error)
        if sentence is None:
            print(f"rank {rank}: {traceback.format_exc()}", file=sys.stderr, end="", flush=True)
        elif code == exits.LOST_PEER:
            time.sleep(0.5)  # let torchrun see first the rank that caused this
            print(f"rank {rank}: {sentence}", file=sys.stderr, flush=True)
        else:
            print(f"rank {rank}: {sentence}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(code)  # tearing down a process group whose peers are gone may block


if __name__ == "__main__":
    is_script = _parse(None).script is not None  # a script gets arguments of its own
    status = main()
    if is_script:
        sys.exit(status)
    # The job is done and the process group is gone. What is left of torch's and gloo's threads may abort the process
    # when the interpreter is taken apart under them; so it is not, after what was registered for the end (the trace).
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
