"""What of a call's NVLink traffic is hidden under tensor work, from a trace of the mega-kernel and its routing.

    found = overlap(events, num_ctas=132, parts=link_traffic.pull_parts(...), row_bytes=hidden)

All of it is of one call on one rank, by that rank's clock. A CTA is at tensor work from the arrival of the rows of an
L1 task (not from its start, which may wait for them) or the start of an L2 task until the task ends. The bytes of a
pull are spread evenly over its event; those of an L2 task leave in its epilogue, so they count at its end, and its own
CTA does not. Where weights are expanded, the wait of an L1 task for its panel counts as work: the trace does not tell
them apart. A traced kernel is somewhat slower than the normal one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from megamoe.trace_report import read_events

__all__ = ["Overlap", "calls_of", "overlap", "table"]

Parts = dict[tuple[int, int, int], tuple[int, int]]


@dataclass(frozen=True)
class Overlap:
    """Times in microseconds from the call's start; a time of something that did not happen is NaN.

    Attributes:
        call_us: until the last event ends.
        first_pull, last_pull: start of the first and end of the last pull.
        first_l1: when the rows of an L1 task had come and it ran, for the first time.
        first_l2, first_scatter: start and end of the first L2 task: rows leave between them.
        last_l1, last_l2: ends.
        pulled_mb: over NVLink.
        hidden_pull: of the pulled bytes, weighted by the share of CTAs at tensor work meanwhile.
        hidden_scatter: of the bytes that L2 sends over NVLink, the same.
        rows_wait: share of the CTAs' time until the last L1 that they stood in an L1 task whose rows had not come.
        at_work: share of the CTAs' time in the call at tensor work.
        rate_before, rate_after: GB/s over NVLink while pulls went on, until and from `first_scatter`.
        pull_us_before, pull_us_after: median duration of the whole pulls that began before and after it.
        pulls_before, pulls_after: how many these are.
    """

    call_us: float
    first_pull: float
    last_pull: float
    first_l1: float
    first_l2: float
    first_scatter: float
    last_l1: float
    last_l2: float
    pulled_mb: float
    hidden_pull: float
    hidden_scatter: float
    rows_wait: float
    at_work: float
    rate_before: float
    rate_after: float
    pull_us_before: float
    pull_us_after: float
    pulls_before: int
    pulls_after: int


class _Active:
    """How many of a set of intervals are open at a time, and the integral of that."""

    def __init__(self, spans: Sequence[tuple[float, float]]) -> None:
        ordered = np.array(sorted(spans) or np.empty((0, 2)), dtype=np.float64).reshape(-1, 2)
        self.starts, self.ends = np.sort(ordered[:, 0]), np.sort(ordered[:, 1])
        self.start_sums = np.concatenate([[0.0], np.cumsum(self.starts)])
        self.end_sums = np.concatenate([[0.0], np.cumsum(self.ends)])

    def at(self, time: float) -> int:
        """Return the intervals that hold this time; their ends do not."""
        opened = np.searchsorted(self.starts, time, side="right")
        return int(opened - np.searchsorted(self.ends, time, side="right"))

    def until(self, time: float) -> float:
        """Return the integral from the beginning."""
        opened, closed = np.searchsorted(self.starts, time), np.searchsorted(self.ends, time)
        return float((opened - closed) * time - self.start_sums[opened] + self.end_sums[closed])

    def mean(self, begin: float, end: float) -> float:
        """Return the mean number between two times."""
        return (self.until(end) - self.until(begin)) / (end - begin) if end > begin else float(self.at(begin))


def calls_of(path: Path) -> dict[int, list[dict[str, Any]]]:
    """Return the events of a trace file by the number of their call.

    Raises:
        ConfigError: the file is no such trace.
        ValueError: events found no room, so the trace is not whole.
    """
    events, dropped = read_events(path)
    if dropped:
        raise ValueError(f"{path.name}: {dropped} events are missing; trace fewer tokens")
    found: dict[int, list[dict[str, Any]]] = {}
    for event in events:
        found.setdefault(event["args"]["call"], []).append(event)
    return found


def overlap(events: Sequence[dict[str, Any]], num_ctas: int, parts: Parts, row_bytes: int) -> Overlap:
    """Work out one call of one rank.

    Args:
        events: of it, as in the file.
        num_ctas: of the launch.
        parts: (own rows, rows of others) by (expert, row block, index), of `link_traffic.pull_parts`.
        row_bytes: of an E4M3 row; a row back has twice as many.

    Raises:
        ValueError: pulls and parts are not the same.
    """
    begin = min(event["ts"] for event in events)
    pulls: dict[tuple[int, int, int], tuple[float, float]] = {}
    tasks: dict[str, list[tuple[float, float, int]]] = {"l1": [], "l2": []}
    last = 0.0
    for event in events:
        start = event["ts"] - begin
        end = start + event["dur"]
        last = max(last, end)
        args, phase = event["args"], event["name"].split()[0]
        if phase == "pull":  # by the scheduler's warp, or by the math warps
            pulls[args["expert"], args["row_block"], args["index"]] = (start, end)
        elif event["cat"] == "math" and phase in tasks:
            tasks[phase].append((start, end, args["row_block"]))
    if set(pulls) != set(parts):
        raise ValueError(f"the trace has {len(pulls)} pulls and the routing {len(parts)}; are they of the same call?")
    arrived: dict[int, float] = {}
    others: dict[int, int] = {}
    for (expert, block, index), (_, end) in pulls.items():
        arrived[block] = max(arrived.get(block, 0.0), end)
        others[block] = others.get(block, 0) + parts[expert, block, index][1]
    l1 = [(min(end, max(start, arrived[block])), end) for start, end, block in tasks["l1"]]
    l2 = [(start, end) for start, end, _ in tasks["l2"]]
    work = _Active([*l1, *l2])
    first_scatter = min((end for _, end in l2), default=float("nan"))
    last_l1 = max((end for _, end in l1), default=float("nan"))
    bytes_over = {key: parts[key][1] * row_bytes for key in pulls}
    total = sum(bytes_over.values())
    hidden = sum(bytes_over[key] * work.mean(*span) for key, span in pulls.items()) / num_ctas
    scattered, hidden_scatter = 0.0, 0.0
    for _, end, block in tasks["l2"]:
        scattered += others[block]
        # the instant before the end: this task itself is still open, and is taken off
        hidden_scatter += others[block] * max(0, work.at(end - 1e-3) - 1) / max(1, num_ctas - 1)
    waited = sum(max(0.0, min(end, arrived[block]) - start) for start, end, block in tasks["l1"])
    first_pull = min((start for start, _ in pulls.values()), default=float("nan"))
    last_pull = max((end for _, end in pulls.values()), default=float("nan"))
    moved_before = sum(
        count * _share(pulls[key], first_scatter) for key, count in bytes_over.items() if first_scatter == first_scatter
    )
    most = max((sum(part) for part in parts.values()), default=0)
    whole = {key: span for key, span in pulls.items() if sum(parts[key]) == most}
    before = [end - start for start, end in whole.values() if start < first_scatter]
    after = [end - start for start, end in whole.values() if start >= first_scatter]
    return Overlap(
        call_us=last,
        first_pull=first_pull,
        last_pull=last_pull,
        first_l1=min((start for start, _ in l1), default=float("nan")),
        first_l2=min((start for start, _ in l2), default=float("nan")),
        first_scatter=first_scatter,
        last_l1=last_l1,
        last_l2=max((end for _, end in l2), default=float("nan")),
        pulled_mb=total * 1e-6,
        hidden_pull=hidden / total if total else float("nan"),
        hidden_scatter=hidden_scatter / scattered if scattered else float("nan"),
        rows_wait=waited / (num_ctas * last_l1) if tasks["l1"] else float("nan"),
        at_work=work.until(last) / (num_ctas * last),
        rate_before=_rate(moved_before, first_pull, min(first_scatter, last_pull)),
        rate_after=_rate(total - moved_before, first_scatter, last_pull),
        pull_us_before=median(before) if before else float("nan"),
        pull_us_after=median(after) if after else float("nan"),
        pulls_before=len(before),
        pulls_after=len(after),
    )


def _share(span: tuple[float, float], time: float) -> float:
    """Return the part of an interval that lies before a time."""
    start, end = span
    if end <= time:
        return 1.0
    return max(0.0, time - start) / (end - start)


def _rate(moved: float, begin: float, end: float) -> float:
    """Return GB/s of bytes in microseconds."""
    return moved / (end - begin) * 1e-3 if end > begin else float("nan")


def table(found: Sequence[tuple[str, Overlap]]) -> str:
    """Return one line for each quantity, a column for each named call."""
    width = max(9, *(len(name) + 2 for name, _ in found))
    lines = ["".join(["".ljust(20), *(name.rjust(width) for name, _ in found)])]
    for field in Overlap.__dataclass_fields__:
        values = [_shown(getattr(one, field)) for _, one in found]
        lines.append("".join([field.ljust(20), *(text.rjust(width) for text in values)]))
    return "\n".join(lines)


def _shown(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"
