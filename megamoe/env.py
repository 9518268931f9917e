"""Every environment variable that megamoe reads. Nothing else in the package touches `os.environ` for MEGAMOE_*."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

__all__ = ["VARIABLES", "Variable", "flag", "home", "user_id", "value"]


@dataclass(frozen=True)
class Variable:
    """One environment variable: its name, what it holds when unset, and its effect in one sentence."""

    name: str
    default: str
    effect: str


VARIABLES: dict[str, Variable] = {
    v.name: v
    for v in (
        Variable("MEGAMOE_CHECK", "0", "1: checked mode; ids, ranges and the order of collective calls are verified."),
        Variable(
            "MEGAMOE_CACHE_DIR",
            "",
            "Folders of compiled kernels, separated by `:`; the first hit wins, misses go to the first writable one.",
        ),
        Variable("MEGAMOE_PRINT_CONFIGS", "0", "1: print the kernel instance that is chosen for a shape."),
        Variable("MEGAMOE_JIT_DEBUG", "0", "1: print what is compiled and how long it takes."),
        Variable("MEGAMOE_JIT_COMPILER", "nvrtc", "`nvrtc`, `nvcc`, or the path of an nvcc."),
        Variable("MEGAMOE_JIT_CPP_STANDARD", "20", "C++ standard of the kernels."),
        Variable("MEGAMOE_JIT_PRINT_COMPILER_COMMAND", "0", "1: print the options of every compilation."),
        Variable("MEGAMOE_JIT_PTXAS_VERBOSE", "0", "1: print what ptxas says."),
        Variable("MEGAMOE_JIT_PTXAS_CHECK", "0", "1: refuse kernels with spills or local memory."),
        Variable("MEGAMOE_JIT_PRINT_LOAD_TIME", "0", "1: print how long loading a kernel takes."),
        Variable("MEGAMOE_JIT_WITH_LINEINFO", "0", "1: keep line numbers for profilers."),
        Variable("MEGAMOE_JIT_DUMP_ASM", "0", "1: write PTX and SASS beside the cache."),
        Variable("MEGAMOE_JIT_DUMP_PTX", "0", "1: write PTX beside the cache."),
        Variable("MEGAMOE_JIT_DUMP_SASS", "0", "1: write SASS beside the cache; needs cuobjdump."),
        Variable(
            "MEGAMOE_CONFIG", "", "Set by `megamoe launch` for a script job: the path of the resolved configuration."
        ),
        Variable("MEGAMOE_NUM_WORKERS", "", "Threads of the C++ engine on each rank; unset: as many as torch uses."),
        Variable(
            "MEGAMOE_TRACE",
            "",
            "file.json: write a Chrome trace of every task, one per rank, of the C++ engine or the mega-kernel; "
            "`megamoe trace` sums it up.",
        ),
        Variable("MEGAMOE_COMMIT", "", "Commit that benchmarks write into their results; unset: git is asked."),
        Variable("MEGAMOE_SKIP_HOST_BUILD", "0", "1: install without compiling the C++ engine."),
    )
}


def value(name: str) -> str:
    """Return the value of a listed variable, or its default when it is unset or empty.

    Raises:
        KeyError: the variable is not listed in `VARIABLES`.
    """
    return os.environ.get(name) or VARIABLES[name].default


def flag(name: str) -> bool:
    """Return True when a listed variable is set to something other than 0, false, no or off."""
    return value(name).strip().lower() not in ("", "0", "false", "no", "off")


def home() -> Path | None:
    """Return the user's home folder, or None where there is none."""
    text = os.environ.get("HOME")
    return Path(text) if text else None


def user_id() -> int:
    """Return the numeric id of the user, for names in shared folders."""
    return os.getuid()
