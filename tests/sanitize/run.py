"""Build the stress program under a sanitizer and run it.

python tests/sanitize/run.py thread            ThreadSanitizer, 4 ranks x 2 workers
python tests/sanitize/run.py address           AddressSanitizer and UBSan
python tests/sanitize/run.py weaken            drops each release of the ordering table in turn: each must be found
python tests/sanitize/run.py all [rounds]
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HOST = ROOT / "kernels" / "host"
FLAGS = {
    "thread": ["-fsanitize=thread"],
    "address": ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"],
}
# the edges of kernels/host/sync.h, by number
EDGES = ("publish_arrive", "publish", "pool", "ring1", "hidden", "ring2", "scatter", "tag")
_COMMON = ("pack", "isa_avx512", "isa_avx2", "isa_scalar")
# only these two see MEGAMOE_WEAKEN
_PROTOCOL = ("engine", "tasks")
_REPORT_EXIT = 66


class Builder:
    """Compiles the stress program into a folder; what does not depend on an edge is compiled once.

    Args:
        folder: for objects and programs.
        sanitizer: "thread" or "address".
    """

    def __init__(self, folder: Path, sanitizer: str) -> None:
        self.folder = folder
        self.flags = [
            *("-std=c++20", "-O1", "-g", "-ffp-contract=off", "-pthread"),
            *FLAGS[sanitizer],
            *("-I", str(HOST), "-I", str(ROOT / "kernels" / "include")),
        ]
        self.compiler = os.environ.get("CXX", "g++")
        self.common = [self._compile(HOST / f"{name}.cpp") for name in _COMMON]
        self.common.append(self._compile(ROOT / "tests" / "sanitize" / "stress.cpp"))

    def _compile(self, source: Path, weaken: int = 0) -> Path:
        target = self.folder / f"{source.stem}.{weaken}.o"
        define = f"-DMEGAMOE_WEAKEN={weaken}"
        _run([self.compiler, *self.flags, define, "-c", str(source), "-o", str(target)], 240)
        return target

    def program(self, weaken: int = 0) -> Path:
        """Return the program with edge number `weaken` weakened; 0 = none."""
        target = self.folder / f"stress{weaken}"
        objects = self.common + [self._compile(HOST / f"{name}.cpp", weaken) for name in _PROTOCOL]
        _run([self.compiler, *self.flags, *map(str, objects), "-o", str(target)], 240)
        return target


def _run(command: list[str], limit_s: float) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[:2])} ...\n{done.stderr[-3000:]}")


def run_stress(program: Path, rounds: int = 20, seed: int = 1, limit_s: float = 300) -> tuple[int, str]:
    """Run 4 ranks x 2 workers; return the exit code (0 = no report, right results) and the end of the output."""
    environment = {
        **os.environ,
        "TSAN_OPTIONS": f"halt_on_error=1 exitcode={_REPORT_EXIT}",
        "ASAN_OPTIONS": f"exitcode={_REPORT_EXIT}",
    }
    command = [str(program), str(rounds), "4", "2", str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, env=environment)
    return done.returncode, (done.stdout + done.stderr)[-4000:]


def main(arguments: list[str]) -> int:
    what = arguments[0] if arguments else "all"
    rounds = int(arguments[1]) if len(arguments) > 1 else 100
    failed = False
    with tempfile.TemporaryDirectory(prefix="megamoe-sanitize-") as name:
        folder = Path(name)
        for sanitizer in ("thread", "address"):
            if what in (sanitizer, "all") or (what, sanitizer) == ("weaken", "thread"):
                (folder / sanitizer).mkdir()
                builder = Builder(folder / sanitizer, sanitizer)
                if what != "weaken":
                    code, text = run_stress(builder.program(), rounds)
                    print(
                        f"{sanitizer}: exit {code}: {text.strip().splitlines()[-1] if code == 0 else text}", flush=True
                    )
                    failed |= code != 0
                if sanitizer == "thread" and what in ("weaken", "all"):
                    for number, edge in enumerate(EDGES, 1):
                        code, text = run_stress(builder.program(number))
                        print(f"weakened {edge}: {'found' if code else 'NOT FOUND'} (exit {code})", flush=True)
                        failed |= code == 0
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
