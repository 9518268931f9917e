"""What the jobs print: tables and load bars, on rank 0."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

__all__ = ["console", "load_bars", "print_load", "summary_table"]

_BAR = 24
_MAX_BARS = 32


def console() -> Console:
    """Return a console that does not break lines when its output goes to a file or a pipe."""
    return Console(highlight=False) if sys.stdout.isatty() else Console(highlight=False, width=140)


def summary_table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Return a table with right-aligned columns."""
    table = Table(title=title, title_justify="left", title_style="bold")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def load_bars(load: Sequence[int], experts_per_rank: int) -> list[str]:
    """Return one line per expert: number, rank, assignments, bar; for many experts only the most loaded ones.

    Args:
        load: assignments per expert.
        experts_per_rank: experts that one rank holds.

    Returns:
        the lines, with a last one that sums up.
    """
    total, largest = sum(load), max(max(load), 1)
    shown = list(range(len(load)))
    if len(shown) > _MAX_BARS:
        shown = sorted(sorted(shown, key=lambda expert: (-load[expert], expert))[:_MAX_BARS])
    digits = len(str(largest))
    lines = []
    for expert in shown:
        bar = "#" * round(_BAR * load[expert] / largest)
        lines.append(
            f"expert {expert:>4}  rank {expert // experts_per_rank:>3}  {load[expert]:>{digits}}  {bar}".rstrip()
        )
    mean = total / len(load)
    left_out = f"; the {len(shown)} most loaded shown" if len(shown) < len(load) else ""
    lines.append(
        f"{total} assignments to {len(load)} experts: busiest {max(load)}, mean {mean:.1f}, "
        f"{sum(1 for count in load if count == 0)} idle{left_out}"
    )
    return lines


def print_load(out: Console, load: Sequence[int], experts_per_rank: int) -> None:
    """Print the lines of `load_bars`, two experts beside each other."""
    *bars, total = load_bars(load, experts_per_rank)
    half = -(-len(bars) // 2)
    width = max(len(line) for line in bars) + 3
    for index, line in enumerate(bars[:half]):
        beside = bars[half + index] if half + index < len(bars) else ""
        out.print(f"{line:<{width}}{beside}".rstrip(), markup=False)
    out.print(total, markup=False)
