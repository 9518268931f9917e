"""The picture of a trace of the mega-kernel: what its CTAs do at every moment of a call."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megamoe.errors import ConfigError
from megamoe.launch.plot import check_plot_path
from megamoe.trace_report import read_events

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["save_trace", "trace_figure"]

# what math warps do, as a call goes, and its colour
_MATH = {"publish": "C0", "pull": "C1", "expand": "C5", "l1": "C2", "l2": "C3", "combine": "C4"}
_MOMENTS = 400


def trace_figure(events: Sequence[dict[str, Any]], title: str) -> Figure:
    """Draw one call of one rank.

    Args:
        events: of `read_events`, of one call and rank, of the mega-kernel.
        title: heading.

    Returns:
        a figure of two axes over time: CTAs by the phase that their math warps are in, stacked, and below it the pulls
        in flight.
    """
    from matplotlib.figure import Figure

    begin = min(event["ts"] for event in events)
    end = max(event["ts"] + event["dur"] for event in events) - begin
    spans: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for event in events:
        start = event["ts"] - begin
        spans[event["cat"], event["name"].split()[0]].append((start, start + event["dur"]))
    times = [end * (i + 0.5) / _MOMENTS for i in range(_MOMENTS)]
    figure = Figure(figsize=(9.0, 4.2), layout="constrained")
    tasks, pulls = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    heights = [_at_work(spans["math", phase], times) for phase in _MATH]
    tasks.stackplot(times, heights, labels=_MATH, colors=list(_MATH.values()), step="mid")
    tasks.set_ylabel("CTAs at work")
    tasks.set_ylim(0, 1.18 * max(1, len(spans["cta", "call"])))  # room for the legend
    tasks.legend(loc="upper right", frameon=False, ncols=len(_MATH))
    tasks.set_title(title)
    in_flight = spans["pull", "pull"] + spans["math", "pull"]  # of schedulers, of math warps
    pulls.fill_between(times, _at_work(in_flight, times), step="mid", color="0.5")
    pulls.set_ylabel("pulls in flight")
    pulls.set_ylim(bottom=0)
    pulls.set_xlabel("us from the start of the call")
    pulls.set_xlim(0, end)
    return figure


def save_trace(path: Path, target: Path, call: int | None) -> None:
    """Draw a call of a trace file as PNG.

    Args:
        path: of the trace.
        target: file to write, `.png`.
        call: number of the call; None = the last one, which is warm.

    Raises:
        MegaMoeError: the file cannot be written, or holds no such call of the mega-kernel.
    """
    check_plot_path(target)
    events, _ = read_events(path)
    events = [event for event in events if event["cat"] != "worker"]
    if not events:
        raise ConfigError(f"--plot: {path} holds no call of the mega-kernel")
    calls = sorted({event["args"]["call"] for event in events})
    chosen = calls[-1] if call is None else call
    events = [event for event in events if event["args"]["call"] == chosen]
    if not events:
        raise ConfigError(f"--call {call}: the trace has calls {calls[0]} to {calls[-1]}")
    trace_figure(events, f"{path.name}, call {chosen}").savefig(target, format="png", dpi=90)


def _at_work(spans: Sequence[tuple[float, float]], times: Sequence[float]) -> list[int]:
    """Return how many spans cover each time."""
    starts, ends = sorted(start for start, _ in spans), sorted(end for _, end in spans)
    return [bisect_right(starts, time) - bisect_right(ends, time) for time in times]
