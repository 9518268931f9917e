"""What `megamoe trace` prints: tasks of a trace by phase and role, how many, when, and how long.

megamoe trace file.json file.1.json
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from megamoe.errors import ConfigError

__all__ = ["read_events", "report", "run_trace_command"]

_PHASES = ("publish", "claim", "pull", "expand", "l1", "l2", "combine", "call")  # as a call goes
_ROLES = ("worker", "scheduler", "pull", "rows", "math", "cta")
_COLUMNS = ("first start", "last end", "median", "max")
_NO_SUMS = {"call", "generation"}


def report(paths: Sequence[str | Path], call: int | None = None) -> str:
    """Return a table of one or several traces of MEGAMOE_TRACE.

    Times of the table are microseconds. Starts and ends count from the first event of their own call and rank, so
    clocks of several GPUs are not compared; over several calls, the earliest start and the latest end are told.

    Args:
        paths: the files, one a rank.
        call: count the events of this call alone, numbered from 0 in each process.

    Raises:
        ConfigError: a file cannot be read or is no such trace; no event is left.
    """
    events: list[dict[str, Any]] = []
    dropped = 0
    for path in paths:
        found, missing = read_events(Path(path))
        events += found
        dropped += missing
    if call is not None:
        calls = sorted({event["args"]["call"] for event in events})
        events = [event for event in events if event["args"]["call"] == call]
        if not events:
            raise ConfigError(f"--call {call}: the trace has calls {calls[0]} to {calls[-1]}")
    begins: dict[tuple[int, int], float] = {}
    for event in events:
        key = (event["pid"], event["args"]["call"])
        begins[key] = min(begins.get(key, event["ts"]), event["ts"])
    groups: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    sums: dict[str, list[int]] = defaultdict(list)
    for event in events:
        start = event["ts"] - begins[event["pid"], event["args"]["call"]]
        groups[event["name"].split()[0], event["cat"]].append((start, event["dur"]))
        if event["cat"] == "cta":
            for name, cycles in event["args"].items():
                if name not in _NO_SUMS:
                    sums[name].append(cycles)
    ranks = len({pid for pid, _ in begins})
    calls_made = len({number for _, number in begins})
    lines = [f"events: {len(events)}, calls: {calls_made}, ranks: {ranks}; us from the call's start"]
    lines.append(f"{'phase':<9}{'role':<11}{'count':>8}" + "".join(f"{name:>13}" for name in _COLUMNS))
    for phase, role in sorted(groups, key=_order):
        spans = groups[phase, role]
        durations = [duration for _, duration in spans]
        numbers = (
            min(start for start, _ in spans),
            max(start + duration for start, duration in spans),
            median(durations),
            max(durations),
        )
        lines.append(f"{phase:<9}{role:<11}{len(spans):>8}" + "".join(f"{number:>13.2f}" for number in numbers))
    for name, cycles in sorted(sums.items()):
        lines.append(f"cycles of a CTA in {name}: median {median(cycles):.0f}, max {max(cycles)}, of {len(cycles)}")
    if dropped:
        lines.append(f"{dropped} events found no room: the last ones of some CTAs are missing")
    return "\n".join(lines)


def run_trace_command(paths: Sequence[str], call: int | None) -> int:
    """Print the report."""
    print(report(paths, call))
    return 0


def _order(group: tuple[str, str]) -> tuple[int, int]:
    return _PHASES.index(group[0]), _ROLES.index(group[1])


def read_events(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the events of a trace that have a duration, and how many are missing.

    Raises:
        ConfigError: the file cannot be read or is no such trace; it has no events.
    """
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise ConfigError(f"{path}: not JSON; a file that MEGAMOE_TRACE has written is needed") from None
    try:
        events = [event for event in content["traceEvents"] if event["ph"] == "X"]
        well_made = all(_is_event(event) for event in events)
        dropped = content["otherData"]["dropped_events"]
        well_made = well_made and type(dropped) is int
    except (KeyError, TypeError, ValueError, IndexError, AttributeError):
        well_made = False
    if not well_made:
        raise ConfigError(f"{path}: not a trace that MEGAMOE_TRACE has written")
    if not events:
        raise ConfigError(f"{path}: holds no events")
    return events, dropped


def _is_event(event: dict[str, Any]) -> bool:
    """Return whether an event has what the report reads, in the types that it reckons with."""
    _order((event["name"].split()[0], event["cat"]))
    times_are = all(type(event[name]) in (int, float) and math.isfinite(event[name]) for name in ("ts", "dur"))
    args = event["args"]
    return times_are and type(event["pid"]) is int and all(type(args[name]) is int for name in ("call", *args))
