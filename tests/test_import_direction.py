"""Imports point one way: launch, integrations -> layers -> the op -> kernels, comm -> config, errors, env."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("kernels", "comm", "layers", "configs", "launch")

BASE = {
    "megamoe",
    "megamoe.attention_sizes",
    "megamoe.trace",
    "megamoe.trace_report",
    "megamoe.config",
    "megamoe.config_report",
    "megamoe.config_schema",
    "megamoe.config_sections",
    "megamoe.configs",
    "megamoe.env",
    "megamoe.errors",
    "megamoe.progress",
}
OP = {"megamoe.functional", "megamoe.backends", "megamoe.workspace", "megamoe.device_workspace", "megamoe.mega"}
TIERS: dict[str, set[str]] = {
    "base": BASE,
    "testing": BASE | {"megamoe.testing"},
    "kernels": BASE | {"megamoe.kernels"},
    "comm": BASE | {"megamoe.comm"},
    "op": BASE | OP | {"megamoe.kernels", "megamoe.comm"},
    "layers": BASE | OP | {"megamoe.kernels", "megamoe.comm", "megamoe.layers"},
}


def modules() -> list[tuple[str, Path]]:
    """Return (module name, file) of every Python file that the package ships."""
    found = []
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            found.append(("megamoe." + ".".join(path.relative_to(ROOT).with_suffix("").parts), path))
    for path in sorted((ROOT / "megamoe").glob("*.py")):
        found.append((f"megamoe.{path.stem}", path))
    for folder in ("backends", "testing", "integrations"):
        for path in sorted((ROOT / "megamoe" / folder).rglob("*.py")):
            found.append((".".join(path.relative_to(ROOT).with_suffix("").parts), path))
    return [(name.removesuffix(".__init__"), path) for name, path in found]


def imported(path: Path) -> set[str]:
    """Return every megamoe module that a file names in an import, at any depth."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return {name for name in names if name.split(".")[0] == "megamoe"}


def tier(module: str) -> str | None:
    """Return the tier of a module; None means that it may import everything."""
    for name in ("kernels", "comm", "layers", "testing"):
        if module == f"megamoe.{name}" or module.startswith(f"megamoe.{name}."):
            return name
    if module.startswith(("megamoe.launch", "megamoe.integrations")) or module in ("megamoe.cli", "megamoe.__init__"):
        return None
    if any(module == name or module.startswith(name + ".") for name in OP):
        return "op"
    return None if module == "megamoe" else "base"


def allowed(name: str, names: set[str]) -> bool:
    return any(
        (name == known or name.startswith(known + ".")) if known != "megamoe" else name == known for known in names
    )


@pytest.mark.parametrize(("module", "path"), modules(), ids=lambda value: value if isinstance(value, str) else "")
def test_imports_point_one_way(module: str, path: Path) -> None:
    level = tier(module)
    if level is None:
        return
    wrong = sorted(name for name in imported(path) if not allowed(name, TIERS[level]))
    assert not wrong, f"{module} ({level}) may not import {wrong}"


def test_the_walk_sees_a_wrong_import(tmp_path: Path) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text("from megamoe.layers.moe import MoELayer\n")
    assert [name for name in imported(bad) if not allowed(name, TIERS["kernels"])] == ["megamoe.layers.moe.MoELayer"]


def test_no_generic_import_names() -> None:
    for _, path in modules():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                assert node.module.split(".")[0] not in FOLDERS, path


def test_importing_the_package_is_cheap() -> None:
    code = "import sys, megamoe; print([m for m in ('torch', 'numpy', 'yaml', 'megamoe.config') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_every_public_name_resolves() -> None:
    import megamoe

    for name in megamoe.__all__:
        assert getattr(megamoe, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'MoELayr'"):
        _ = megamoe.MoELayr
