"""The result files: rows of a run with what it ran on, its commit and its command, all asked by the run itself."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

from megamoe import env

ROOT = Path(__file__).resolve().parents[1]


def _first_line(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, cwd=ROOT)
        return done.stdout.splitlines()[0].strip() if done.returncode == 0 else None
    except (OSError, IndexError, subprocess.TimeoutExpired):
        return None


def commit() -> str:
    """Return the commit that runs: MEGAMOE_COMMIT, else git's answer, with `-dirty` where files differ from it.

    Raises:
        SystemExit: neither knows; results without a commit are worth nothing.
    """
    found = env.value("MEGAMOE_COMMIT") or _first_line(["git", "describe", "--always", "--dirty", "--abbrev=7"])
    if not found:
        sys.exit("--out: no commit is known; set MEGAMOE_COMMIT or run in a git checkout")
    return found


def command() -> str:
    """Return the command of this run: from the repository's root, with no folder of the machine in it."""
    world_size = os.environ.get("WORLD_SIZE")
    starter = ["torchrun", "--nproc-per-node", world_size] if world_size else ["python"]
    arguments = [Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:]]
    return shlex.join([*starter, f"benchmarks/{Path(sys.argv[0]).name}", *arguments])


def case_options(about: str | None) -> argparse.Namespace:
    """Return `out` and `only` of a benchmark of named cases on one GPU.

    Args:
        about: the benchmark's docstring, of which the first line is shown.

    Raises:
        SystemExit: wrong options, no GPU, or results wanted and no commit known.
    """
    import torch

    parser = argparse.ArgumentParser(description=about.splitlines()[0] if about else None)
    parser.add_argument("--out", type=Path, help="result file (JSON)")
    parser.add_argument("--only", default="", help="only cases whose name has this text")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a Hopper GPU, torch finds no CUDA device")
    if arguments.out:
        commit()
    return arguments


def write(path: Path, rows: list[dict[str, object]], **more: object) -> None:
    """Write the rows of this run.

    Args:
        path: of the JSON file; its folder is made.
        rows: one dict for each case and method.
        more: further entries.
    """
    import torch

    result = {
        "gpu": torch.cuda.get_device_name(),
        "driver": _first_line(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
        "command": command(),
        "rows": rows,
        **more,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
