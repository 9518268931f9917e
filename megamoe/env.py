"""Every environment variable that megamoe reads. Nothing else in the package touches `os.environ` for MEGAMOE_*."""

from __future__ import annotations

import os
from dataclasses import dataclass

__all__ = ["VARIABLES", "Variable", "flag", "value"]


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
            "MEGAMOE_CONFIG", "", "Set by `megamoe launch` for a script job: the path of the resolved configuration."
        ),
        Variable("MEGAMOE_NUM_WORKERS", "", "Threads of the C++ engine on each rank; unset: as many as torch uses."),
        Variable("MEGAMOE_TRACE", "", "file.json: write a Chrome trace of every task of the C++ engine, one per rank."),
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
