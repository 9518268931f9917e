"""Print the README's tables of figures from `benchmarks/results/*.json`; with --write, put them between two markers.

The mega-kernel first, a line for each model; then the GEMMs, a line for each case that was measured against an oracle:
chilled and sustained (see `benchmarks/notes/`), the peer of the same run where there was one, error.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PLAIN = {"model", "weights", "scale", "T", "ranks", "comm"}  # neither skewed, nor unfused, nor with another lag
TOKENS = (1, 8, 32, 128, 512, 2048, 8192)
BEGIN, END = "<!-- figures: python benchmarks/readme_table.py --write -->", "<!-- end of figures -->"


def table(results: list[Path]) -> str:
    """Return the Markdown tables of result files."""
    return f"{mega_table(results)}\n\n{gemm_table(results)}"


def mega_table(results: list[Path]) -> str:
    """Return the mega-kernel's: microseconds of a call by tokens a rank, and the floor of one rank's share.

    `ranks_table.py` has what else was measured on several ranks.
    """
    counts: list[int] = []
    found: dict[tuple[str, ...], dict[int, str]] = {}
    for path in results:
        data = json.loads(path.read_text())
        for row in data["rows"]:
            words = dict(word.split("=") for word in row["case"].split())
            if "model" not in words or set(words) - PLAIN or row["method"] not in ("chilled", "back to back"):
                continue
            ranks = words.get("ranks", "1")
            key = (data["gpu"].removeprefix("NVIDIA "), words["model"], words["scale"], ranks, row["method"])
            count = int(words["T"])
            if count not in TOKENS:
                continue
            counts.append(count)
            floor = f" ({row['floor_us']:.0f})" if row["floor_us"] else ""
            found.setdefault(key, {})[count] = f"{row['us']:.0f}{floor}"
    columns = sorted(set(counts))
    lines = [
        f"| GPU | model | scale | ranks | method | {' | '.join(f'T={count}' for count in columns)} |",
        f"|{'---|' * (5 + len(columns))}",
    ]
    for key, times in found.items():
        lines.append(f"| {' | '.join(key)} | {' | '.join(times.get(count, '-') for count in columns)} |")
    return "\n".join(lines)


def gemm_table(results: list[Path]) -> str:
    """Return the GEMMs'."""
    lines = [
        "| GPU | case | chilled us | chilled TFLOPS | sustained TFLOPS | peer, chilled us | error |",
        "|---|---|---|---|---|---|---|",
    ]
    for path in results:
        data = json.loads(path.read_text())
        cases: dict[str, dict[str, dict]] = {}
        for row in data["rows"]:
            cases.setdefault(row["case"], {})[row["method"]] = row
        for case, methods in cases.items():
            if "error" not in methods.get("chilled", {}) or "sustained" not in methods or case.startswith("model="):
                continue
            chilled, sustained = methods["chilled"], methods["sustained"]
            peer = f"{chilled['peer']} {chilled['peer_us']:.1f}" if chilled["peer"] else "-"
            lines.append(
                f"| {data['gpu'].removeprefix('NVIDIA ')} | {case.removeprefix('kernel=')} | {chilled['us']:.1f} "
                f"| {chilled['tflops']:.0f} | {sustained['tflops']:.0f} | {peer} | {chilled['error']:.4f} |"
            )
    return "\n".join(lines)


def main() -> None:
    """Print or write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    text = table(sorted((ROOT / "benchmarks" / "results").glob("*.json")))
    if not parser.parse_args().write:
        print(text)
        return
    readme = ROOT / "README.md"
    before, _, rest = readme.read_text().partition(BEGIN)
    readme.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
