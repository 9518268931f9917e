"""NVIDIA's compute-sanitizer: where it is, and a script's problems under one of its tools."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

__all__ = ["ROOT", "find_sanitizer", "run_command", "run_script", "run_tool"]

ROOT = Path(__file__).resolve().parents[2]
_FOUND = 66  # exit code of the tool when it found something
_LIMIT_S = 200
_PLACES = ("/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer", "/opt/cuda/bin")


def find_sanitizer() -> str | None:
    """Return the path of compute-sanitizer, from PATH, CUDA_HOME or the usual folders."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    folders = [os.environ.get("PATH", ""), *([f"{home}/bin", f"{home}/compute-sanitizer"] if home else []), *_PLACES]
    return shutil.which("compute-sanitizer", path=os.pathsep.join(folders))


def run_tool(script: Path, sanitizer: str, tool: str) -> tuple[int, str]:
    """Run a script's problems under a tool; return its exit code (0 = nothing found, right results) and the output."""
    command = [sanitizer, "--tool", tool, "--error-exitcode", str(_FOUND), "--print-limit", "20"]
    if tool == "memcheck":
        command += ["--report-api-errors", "no"]  # the bindings probe for functions that a driver may lack
    command += [sys.executable, str(script), "problems"]
    # Every tensor is an allocation of its own, so that an access behind its end is seen.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, env=environment, cwd=ROOT)
    except subprocess.TimeoutExpired as expired:
        output = expired.stdout.decode(errors="replace") if isinstance(expired.stdout, bytes) else expired.stdout or ""
        return 124, f"{output}\n{tool} did not end within {_LIMIT_S} s"
    return done.returncode, done.stdout + done.stderr


def run_script(script: Path, tools: tuple[str, ...]) -> int:
    """Run a script's problems under tools, a line for each; 0 = clean or skipped, with a sentence that says which."""
    sanitizer = find_sanitizer()
    if sanitizer is None:
        print("SKIPPED: compute-sanitizer was not found on PATH, in CUDA_HOME or in /usr/local/cuda: nothing checked")
        return 0
    failed = False
    for tool in tools:
        code, output = run_tool(script, sanitizer, tool)
        lines = output.strip().splitlines()
        print(f"{tool}: exit {code}: {lines[-1] if code == 0 and lines else output[-12000:]}", flush=True)
        failed |= code != 0
    return int(failed)


def run_command(
    script: Path,
    arguments: list[str],
    problems: Callable[[], None],
    about: str | None,
    tools: tuple[str, ...],
    others: tuple[str, ...] = (),
) -> int:
    """Run what a script's command line names; 0 = clean or skipped, with a sentence that says which.

    Args:
        script: the script.
        arguments: of its command line: a tool, "all" (also without any) or "problems", the problems alone.
        problems: launches the kernels and checks their results.
        about: what is printed, and 2 returned, where the arguments are not understood.
        tools: those that are expected to find nothing.
        others: tools that run by name alone.
    """
    what = arguments[0] if arguments else "all"
    if what not in (*tools, *others, "all", "problems") or len(arguments) > 1:
        print(about)
        return 2
    if what == "problems":
        problems()
        return 0
    return run_script(script, tools if what == "all" else (what,))
