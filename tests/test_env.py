"""Environment variables: read in one module, listed once, and the README's table says the same."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megamoe import env

ROOT = Path(__file__).resolve().parents[1]


def test_readme_lists_the_same_variables() -> None:
    rows = re.findall(r"^\| `(MEGAMOE_\w+)` \| (.+?) \| (.+?) \|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    table = {name: (default.strip("`"), effect) for name, default, effect in rows}
    assert table == {v.name: (v.default or "unset", v.effect) for v in env.VARIABLES.values()}


def test_only_env_reads_them() -> None:
    for folder in ("megamoe", "kernels", "comm", "layers", "launch"):
        for path in (ROOT / folder).rglob("*.py"):
            if path.resolve() == (ROOT / "megamoe" / "env.py") or "build" in path.parts:
                continue
            text = path.read_text()
            found = re.findall(r"(?:environ(?:\.get)?[\[(]|getenv\()\s*[\"']MEGAMOE_\w+", text)
            assert not found, f"{path} reads {found}"


def test_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, expected in (("", False), ("0", False), ("off", False), ("False", False), ("1", True), ("yes", True)):
        monkeypatch.setenv("MEGAMOE_CHECK", text)
        assert env.flag("MEGAMOE_CHECK") is expected
    with pytest.raises(KeyError):
        env.value("MEGAMOE_NO_SUCH_THING")
