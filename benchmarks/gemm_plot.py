"""A bar plot of a GEMM result file: chilled, sustained and the peer, in TFLOPS, with the rate of the floor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FORMATS = {"fp8_fp4": "FP4", "fp8": "FP8"}


def label(case: str) -> str:
    """Return a case's name in four short lines."""
    words = dict(word.split("=", 1) for word in case.split())
    kernel = words["kernel"].removeprefix("m_grouped_").removesuffix("_gemm_nt")
    rows = words.get("m") or f"{words['groups']} x {words['rows'].replace('multinomial-', 'uneven ')}"
    form = "masked" if "masked" in words else "dense" if "m" in words else "grouped"
    return f"{_FORMATS[kernel]} {form}\n{words['scale']}\n{rows}\nn {words['n']} k {words['k']}"


def figure(data: dict[str, Any]) -> Figure:
    """Draw the cases of a result file that have a chilled and a sustained figure."""
    from matplotlib.figure import Figure

    cases: dict[str, dict[str, dict[str, Any]]] = {}
    for row in data["rows"]:
        cases.setdefault(row["case"], {})[row["method"]] = row
    cases = {case: rows for case, rows in cases.items() if "error" in rows.get("chilled", {}) and "sustained" in rows}
    drawn = Figure(figsize=(max(7.0, 1.15 * len(cases)), 4.2), layout="constrained")
    axes = drawn.subplots()
    for i, method in enumerate(("chilled", "sustained")):
        places = [x + 0.27 * (i - 1) for x in range(len(cases))]
        axes.bar(places, [rows[method]["tflops"] for rows in cases.values()], width=0.25, label=method, color=f"C{i}")
    chilled = [rows["chilled"] for rows in cases.values()]
    peers = [(x + 0.27, row) for x, row in enumerate(chilled) if row["peer_us"]]
    if peers:
        rates = [row["tflops"] * row["us"] / row["peer_us"] for _, row in peers]
        axes.bar([x for x, _ in peers], rates, width=0.25, label="peer, chilled", color="0.6")
    floors = [
        rows["chilled"]["tflops"] * rows["chilled"]["us"] / rows["chilled"]["floor_us"] for rows in cases.values()
    ]
    axes.scatter(range(len(cases)), floors, marker="_", s=900, color="0.2", linewidths=1, label="floor")
    axes.set_xticks(range(len(cases)), [label(case) for case in cases], fontsize=7)
    axes.set_xlim(-0.6, len(cases) - 0.4)
    axes.set_ylim(0, 1.15 * max(floors, default=1.0))  # room for the legend
    axes.set_ylabel("TFLOPS")
    axes.set_title(f"{data['gpu']}, {data['commit']}, {data['date']}")
    axes.legend(frameon=False, ncols=4, fontsize=8)
    return drawn


def save(result: Path, target: Path) -> None:
    """Draw a result file as PNG."""
    figure(json.loads(result.read_text())).savefig(target, format="png", dpi=130)
