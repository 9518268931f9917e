"""Draw the mega-kernel on several ranks beside the unfused layer and published figures, over tokens a rank.

python benchmarks/mega_moe_plot.py [RESULT.json ...] --out benchmarks/results/mega_moe-ep.svg

Needs no GPU. Without files: all of `benchmarks/results/mega_moe-*-ep*.json`. Chilled times, or back to back where a
layer has no others; the labels say which.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from public_figures import PUBLIC, PUBLIC_NAME
from ranks_table import name_of, results, rows_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TITLES = {"flash": "V4-Flash layer", "pro": "V4-Pro layer"}
TICKS = (1, 8, 32, 128, 512, 2048, 8192)
STYLES = ("-o", "--s", "--^", "--v", "-.d", ":x")


def lines_of(paths: Sequence[Path]) -> dict[str, dict[str, dict[int, float]]]:
    """Return microseconds by model, label and tokens a rank; published ones last."""
    found: dict[str, dict[tuple[str, str], dict[str, dict[int, float]]]] = {model: {} for model in TITLES}
    for words, row in rows_of(paths):
        if (
            words["model"] in TITLES
            and row["method"] in ("chilled", "back to back")
            and not {"skew", "lag"} & set(words)
        ):
            methods = found[words["model"]].setdefault((name_of(words), words["ranks"]), {})
            methods.setdefault(row["method"], {})[int(words["T"])] = row["us"]
    lines: dict[str, dict[str, dict[int, float]]] = {}
    for model, layers in found.items():
        lines[model] = {}
        for (name, ranks), methods in layers.items():
            method = "chilled" if "chilled" in methods else "back to back"
            lines[model][f"{name}, {ranks} GPUs, {method}"] = dict(sorted(methods[method].items()))
        lines[model][f"{PUBLIC_NAME}, chilled"] = dict(PUBLIC[model])
    return lines


def figure(paths: Sequence[Path]) -> Figure:
    """Draw result files, a panel for each model."""
    from matplotlib.figure import Figure

    lines = lines_of(paths)
    drawn = Figure(figsize=(10.5, 4.4), layout="constrained")
    panels = drawn.subplots(1, len(TITLES))
    for axes, (model, title) in zip(panels, TITLES.items(), strict=True):
        for number, (label, times) in enumerate(lines[model].items()):
            published = label.startswith(PUBLIC_NAME)
            style, color = (STYLES[-1], "0.35") if published else (STYLES[number % 5], f"C{number}")
            axes.plot(list(times), list(times.values()), style, color=color, label=label, markersize=4)
        axes.set_xscale("log", base=2)
        axes.set_xticks(TICKS, list(map(str, TICKS)))
        axes.set_yscale("log")
        axes.set_xlabel("tokens a rank")
        axes.set_ylabel("us")
        axes.set_title(title)
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, fontsize=7)
    return drawn


def save(paths: Sequence[Path], target: Path) -> None:
    """Draw result files into a file, in the format of its suffix; the same results give the same bytes.

    Raises:
        ValueError: neither .svg nor .png.
    """
    if target.suffix not in (".svg", ".png"):
        raise ValueError(f"--out: must end with .svg or .png, got {target.name!r}")
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": "megamoe"}):
        metadata = {"Date": None} if target.suffix == ".svg" else None
        figure(paths).savefig(target, dpi=130, metadata=metadata)


def main() -> None:
    """Draw what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, metavar="RESULT.json")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="an .svg or .png")
    options = parser.parse_args()
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        parser.error("needs matplotlib: pip install 'megamoe[plot]'")
    if options.out.suffix not in (".svg", ".png"):
        parser.error(f"--out: must end with .svg or .png, got {options.out.name!r}")
    missing = [str(path) for path in (*options.files, options.out.parent) if not path.exists()]
    if missing:
        parser.error(f"no such file or folder: {', '.join(missing)}")
    save(options.files or results(), options.out)


if __name__ == "__main__":
    main()
