"""The bar plot of the experts' load. matplotlib is imported here only, and only when a plot is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megamoe.errors import MegaMoeError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["check_plot_path", "expert_load_figure", "save_expert_load"]


def check_plot_path(path: str | Path) -> None:
    """Refuse a plot that could not be written, before the job starts.

    Raises:
        MegaMoeError: wrong suffix, no such folder, or no matplotlib.
    """
    target = Path(path)
    if target.suffix.lower() != ".png":
        raise MegaMoeError(f"--plot {path}: the name must end in .png")
    if not target.resolve().parent.is_dir():
        raise MegaMoeError(f"--plot {path}: there is no folder {target.resolve().parent}")
    if target.is_dir():
        raise MegaMoeError(f"--plot {path}: is a folder")
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise MegaMoeError("--plot: needs matplotlib; run `pip install 'megamoe[plot]'`") from error


def expert_load_figure(load: Sequence[int], experts_per_rank: int, title: str) -> Figure:
    """Draw one bar per expert, coloured by the rank that holds it.

    Args:
        load: assignments per expert.
        experts_per_rank: experts that one rank holds.
        title: heading.

    Returns:
        a figure whose first axes hold exactly `len(load)` bars, in the order of the experts.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(6.0, min(24.0, 0.16 * len(load))), 3.6), layout="constrained")
    axes = figure.subplots()
    colors = [f"C{(expert // experts_per_rank) % 10}" for expert in range(len(load))]
    axes.bar(range(len(load)), list(load), width=0.8, color=colors)
    axes.axhline(sum(load) / max(1, len(load)), color="0.3", linestyle="--", linewidth=1, label="balanced")
    axes.set_xlabel(f"expert ({experts_per_rank} per rank, one colour each rank)")
    axes.set_ylabel("assignments")
    axes.set_xlim(-0.6, len(load) - 0.4)
    axes.set_title(title)
    axes.legend(loc="upper right", frameon=False)
    return figure


def save_expert_load(path: str | Path, load: Sequence[int], experts_per_rank: int, title: str) -> None:
    """Write the plot of `expert_load_figure` as a PNG file."""
    expert_load_figure(load, experts_per_rank, title).savefig(path, format="png", dpi=120)
