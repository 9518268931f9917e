"""Print the tables of docs/expert-parallel.md from `benchmarks/results/mega_moe-*-ep*.json`; --write puts them there.

Fused and unfused beside published figures; skewed routing; bytes over NVLink; overlap by traces; lags. A table whose
results are not there is left out.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from public_figures import PUBLIC, PUBLIC_NAME

ROOT = Path(__file__).resolve().parents[1]
DOC = ROOT / "docs" / "expert-parallel.md"
BEGIN, END = "<!-- figures: python benchmarks/ranks_table.py --write -->", "<!-- end of figures -->"
UNFUSED = {
    "host_sync": "unfused, waits for counts",
    "known": "unfused, counts known",
    "graph": "unfused, counts known, CUDA graph",
    "exchange": "its two all-to-alls alone",
}

Row = tuple[dict[str, str], dict[str, Any]]


def results() -> list[Path]:
    """Return the result files of several ranks."""
    return sorted((ROOT / "benchmarks" / "results").glob("mega_moe-*-ep*.json"))


def rows_of(paths: Sequence[Path]) -> Iterator[Row]:
    """Yield (words of the case, row) of every row with a case of the mega-kernel's benchmarks over several ranks."""
    for path in paths:
        for row in json.loads(path.read_text())["rows"]:
            words = dict(word.split("=") for word in row["case"].split())
            if "ranks" in words:
                yield words, row


def name_of(words: dict[str, str]) -> str:
    """Return what ran."""
    return UNFUSED[words["counts"]] if words.get("impl") == "unfused" else "mega-kernel"


def _markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [list(head), ["---"] * len(head), *map(list, lines)]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def times_table(rows: Sequence[Row]) -> str:
    """Return the times by tokens a rank."""
    found: dict[tuple[str, ...], dict[int, float]] = {}
    for words, row in rows:
        if row["method"] in ("chilled", "back to back") and not {"skew", "lag"} & set(words):
            key = (words["model"], name_of(words), words["ranks"], row["method"])
            found.setdefault(key, {})[int(words["T"])] = row["us"]
    for model in {key[0] for key in found} & set(PUBLIC):
        found[model, PUBLIC_NAME, "8", "chilled"] = dict(PUBLIC[model])
    counts = sorted({count for times in found.values() for count in times})
    lines = [
        [*key, *(f"{found[key][count]:.0f}" if count in found[key] else "-" for count in counts)]
        for key in sorted(found, key=lambda key: (key[0], key[3], key[2], key[1]))
    ]
    return _markdown(["model", "layer", "ranks", "method", *(f"T={count}" for count in counts)], lines)


def skew_table(rows: Sequence[Row]) -> str:
    """Return times and loads by skew."""
    found: dict[tuple[str, str, int], dict[str, dict[str, Any]]] = {}
    skewed = {(words["model"], words["ranks"], int(words["T"])) for words, _ in rows if "skew" in words}
    for words, row in rows:
        key = (words["model"], words["ranks"], int(words["T"]))
        if key in skewed and row["method"] in ("chilled", "back to back") and not {"impl", "lag"} & set(words):
            found.setdefault((*key[:2], key[2]), {}).setdefault(words.get("skew", "none"), {})[row["method"]] = row
    lines = []
    for (model, ranks, count), skews in sorted(found.items()):
        for skew, methods in skews.items():
            any_row = next(iter(methods.values()))
            if "fullest_rank" not in any_row:
                continue
            times = [f"{methods[m]['us']:.0f}" if m in methods else "-" for m in ("chilled", "back to back")]
            loads = [f"{any_row['fullest_rank']:.2f}", f"{any_row['fullest_expert']:.2f}"]
            lines.append([model, ranks, str(count), skew, *loads, *times])
    head = ["model", "ranks", "T", "routing", "fullest rank", "fullest expert", "chilled us", "back to back us"]
    return _markdown(head, lines) if lines else ""


def bytes_table(rows: Sequence[Row]) -> str:
    """Return what moves over NVLink beside the time of the call."""
    lines = {}
    for words, row in rows:
        if "dispatch_bytes" not in row or row["method"] != "chilled" or "skew" in words:
            continue
        key = (words["model"], words["ranks"], int(words["T"]))
        moved = [f"{row[name] / 1e6:.2f}" for name in ("dispatch_bytes", "combine_bytes")]
        lines[key] = [*moved, f"{row['link_us']:.1f}", f"{row['us']:.0f}", f"{row['link_us'] / row['us']:.2f}"]
    head = ["model", "ranks", "T", "dispatched MB", "combined MB", "NVLink alone us", "call us", "share"]
    return (
        _markdown(head, [[key[0], key[1], str(key[2]), *line] for key, line in sorted(lines.items())]) if lines else ""
    )


def overlap_table(rows: Sequence[Row]) -> str:
    """Return the sums of traces."""
    columns = {
        "call_us": ".0f",
        "first_scatter": ".0f",
        "last_pull": ".0f",
        "last_l1": ".0f",
        "hidden_pull": ".2f",
        "hidden_scatter": ".2f",
        "rows_wait": ".3f",
        "at_work": ".2f",
        "rate_before": ".0f",
        "rate_after": ".0f",
        "pull_us_before": ".1f",
        "pull_us_after": ".1f",
    }
    lines = []
    for words, row in rows:
        if row["method"] == "trace":
            case = [words["model"], words["T"], words.get("skew", "none"), str(row["rank"])]
            lines.append([*case, *(format(row[name], form) for name, form in columns.items())])
    head = ["model", "T", "routing", "rank", *(name.replace("_", " ") for name in columns)]
    return _markdown(head, lines) if lines else ""


def lag_table(rows: Sequence[Row]) -> str:
    """Return times by lag."""
    found: dict[tuple[str, str, int, int], dict[str, Any]] = {}
    for words, row in rows:
        if "lag" in words:
            key = (words["model"], words["ranks"], int(words["T"]), int(words["lag"]))
            found.setdefault(key, {"own": row["own_lag"], "units": row["units"]})[row["method"]] = row["us"]
    lines = []
    for (model, ranks, count, lag), seen in sorted(found.items()):
        shown = f"{lag} (own)" if lag == seen["own"] else f"{lag} (all)" if lag == seen["units"] else str(lag)
        lines.append([model, ranks, str(count), shown, f"{seen['chilled']:.0f}", f"{seen['back to back']:.0f}"])
    head = ["model", "ranks", "T", "lag, units", "chilled us", "back to back us"]
    return _markdown(head, lines) if lines else ""


def tables(paths: Sequence[Path]) -> str:
    """Return all tables that there are results for, each below its title."""
    rows = list(rows_of(paths))
    parts = {
        "Microseconds of a call": times_table(rows),
        "Skewed routing": skew_table(rows),
        "Rows over NVLink, the busiest rank": bytes_table(rows),
        "Overlap, from traces": overlap_table(rows),
        "Lag of L2 behind L1": lag_table(rows),
    }
    return "\n\n".join(f"### {title}\n\n{text}" for title, text in parts.items() if text)


def main() -> None:
    """Print or write the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    text = tables(results())
    if not parser.parse_args().write:
        print(text)
        return
    before, _, rest = DOC.read_text().partition(BEGIN)
    DOC.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
