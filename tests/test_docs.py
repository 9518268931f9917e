"""The documentation says what the code does, where a machine can compare them."""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path

import pytest

from megamoe.config import preset_names
from megamoe.config_sections import SECTIONS

ROOT = Path(__file__).resolve().parents[1]
TEXTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_configuration_lists_every_key_with_its_default_and_choices() -> None:
    rows = re.findall(
        r"^\| `(\w+\.\w+)` \| (.+?) \| (.+?) \| .+ \|$",
        (ROOT / "docs" / "configuration.md").read_text(),
        re.MULTILINE,
    )
    documented = {key: (values, default) for key, values, default in rows}
    assert len(documented) == len(rows)
    declared = {f"{name}.{f.name}": f for name, section in SECTIONS.items() for f in dataclasses.fields(section)}
    assert set(documented) == set(declared)
    for key, field in declared.items():
        values, default = documented[key]
        if "choices" in field.metadata:
            assert values == ", ".join(field.metadata["choices"]), key
        if field.default is dataclasses.MISSING:
            assert default == "-", key
        elif field.default is not None:
            shown = (
                {True: "true", False: "false"}.get(field.default, str(field.default))
                if isinstance(field.default, bool)
                else str(field.default)
            )
            assert default == shown, key


def test_readme_figures_are_the_results() -> None:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        from readme_table import BEGIN, END, table
    finally:
        sys.path.pop(0)
    expected = table(sorted((ROOT / "benchmarks" / "results").glob("*.json")))
    assert expected.count("\n") > 3
    assert f"{BEGIN}\n{expected}\n{END}" in (ROOT / "README.md").read_text()


def test_readme_lists_every_preset() -> None:
    text = (ROOT / "README.md").read_text()
    for name in preset_names():
        assert f"`{name}`" in text, name


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
        assert (path.parent / target).exists(), f"{path.name}: {target}"


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_texts_are_ascii(path: Path) -> None:
    assert path.read_text().isascii()


def test_memory_of_the_mega_kernel_is_what_the_layout_says() -> None:
    pytest.importorskip("megamoe._host", reason="the C++ engine is not built")
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        from mega_moe_memory import table
    finally:
        sys.path.pop(0)
    text = (ROOT / "docs" / "mega-moe.md").read_text()
    assert table() in text, "put the output of benchmarks/mega_moe_memory.py into docs/mega-moe.md"
