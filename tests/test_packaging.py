"""What an install contains, and that it works outside the checkout, from its root and in editable form."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("kernels", "comm", "layers", "configs", "launch")
DATA_SUFFIXES = {".yaml", ".cuh", ".h", ".cu", ".txt"}


def run(*command: str, cwd: Path, path: str | None = None, limit: int = 240) -> str:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment["MEGAMOE_SKIP_HOST_BUILD"] = "1"
    if path is not None:
        environment["PYTHONPATH"] = path
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=limit)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def pyproject() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def wheel_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds a normal install of the checkout, built as a wheel."""
    pytest.importorskip("setuptools", minversion="77")
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    run(*pip, "wheel", "-q", "--no-build-isolation", "--no-deps", "-w", str(folder), str(ROOT), cwd=folder)
    (wheel,) = folder.glob("megamoe-*.whl")
    site = folder / "site"
    run(*pip, "install", "-q", "--no-deps", "--target", str(site), str(wheel), cwd=folder)
    return site


def test_every_package_is_listed() -> None:
    listed = set(pyproject()["tool"]["setuptools"]["packages"])
    found = {"megamoe"}
    for folder in FOLDERS:
        found |= {"megamoe." + ".".join(p.parent.relative_to(ROOT).parts) for p in (ROOT / folder).rglob("__init__.py")}
    for path in (ROOT / "megamoe").glob("*/__init__.py"):
        if not path.parent.is_symlink():
            found.add(f"megamoe.{path.parent.name}")
    assert listed == found


def test_links_point_to_the_folders() -> None:
    for folder in FOLDERS:
        link = ROOT / "megamoe" / folder
        assert link.is_symlink() and os.readlink(link) == f"../{folder}"


def test_wheel_holds_only_megamoe(wheel_site: Path) -> None:
    top = {entry.name for entry in wheel_site.iterdir()}
    assert {name for name in top if not name.endswith(".dist-info")} == {"megamoe", "bin"}, top
    record = next(wheel_site.glob("*.dist-info")) / "RECORD"
    names = [line.split(",")[0] for line in record.read_text().splitlines()]
    strange = [n for n in names if not n.startswith(("megamoe/", "megamoe-", "../../bin/megamoe", "bin/megamoe"))]
    assert not strange


def test_wheel_ships_every_data_file(wheel_site: Path) -> None:
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in DATA_SUFFIXES and "build" not in path.parts:
                shipped = wheel_site / "megamoe" / path.relative_to(ROOT)
                assert shipped.is_file() and shipped.read_bytes() == path.read_bytes(), path
    assert (wheel_site / "megamoe" / "py.typed").exists()


def test_normal_install_works_outside_the_checkout(wheel_site: Path, tmp_path: Path) -> None:
    code = (
        "import megamoe, importlib.resources as r, sys\n"
        "from megamoe.config import MoEConfig\n"
        "import megamoe.kernels.formats, megamoe.layers.moe\n"
        "print(megamoe.__file__)\n"
        "print(MoEConfig.from_yaml('quickstart').model.hidden)\n"
        "print(len([p for p in r.files('megamoe.configs').iterdir() if p.name.endswith('.yaml')]) >= 10)\n"
        "for name in ('kernels', 'comm', 'layers', 'configs', 'launch'):\n"
        "    try: __import__(name)\n"
        "    except ImportError: pass\n"
        "    else: raise SystemExit(name + ' is importable')\n"
    )
    out = run(sys.executable, "-c", code, cwd=tmp_path, path=str(wheel_site)).splitlines()
    assert Path(out[0]).is_relative_to(wheel_site)
    assert out[2] == "True"
    run(sys.executable, "-m", "megamoe.launch", "--help", cwd=tmp_path, path=str(wheel_site))


def test_from_the_root_without_install() -> None:
    out = run(sys.executable, "-c", "import megamoe.layers, megamoe; print(megamoe.__file__)", cwd=ROOT)
    assert Path(out.strip()).resolve() == ROOT / "megamoe" / "__init__.py"


def test_editable_install_keeps_generic_names_out(tmp_path: Path) -> None:
    target = tmp_path / "site"
    pytest.importorskip("setuptools", minversion="77")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q", "--no-deps"]
    run(*pip, "--no-build-isolation", "--target", str(target), "-e", str(ROOT), cwd=tmp_path)
    code = (
        f"import site; site.addsitedir({str(target)!r})\n"
        "import megamoe.layers, megamoe.comm, megamoe; print(megamoe.__file__)\n"
        "import importlib.util as u\n"
        "print([n for n in ('kernels', 'comm', 'layers', 'configs', 'launch') if u.find_spec(n)])\n"
    )
    out = run(sys.executable, "-c", code, cwd=tmp_path).splitlines()
    assert Path(out[0]).resolve() == ROOT / "megamoe" / "__init__.py"
    assert out[1] == "[]"


@pytest.mark.parametrize(
    ("hide", "words"),
    [("ensurepip", ["python3-venv", "PYTHON="]), ("old", ["Python 3.10 or newer", "PYTHON="])],
)
def test_set_up_says_what_is_missing(hide: str, words: list[str], tmp_path: Path) -> None:
    """One sentence with the remedy, no traceback, before anything is installed."""
    if hide == "old":
        patch = "sys.version_info = (3, 9, 2)"
    else:
        patch = "sys.modules['ensurepip'] = None"
    code = (
        f"import sys; {patch}; sys.path.insert(0, {str(ROOT / 'tools')!r}); sys.argv = ['x', 'base']\n"
        "import make_env; make_env.VENV = '/nonexistent'; make_env.main()"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    for word in words:
        assert word in done.stderr


def test_the_tests_environment_is_made_out_of_the_quickstarts(tmp_path: Path) -> None:
    """torch is a large download: `make test` after `make quickstart` adds packages, and fetches it no second time."""
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT / 'tools')!r}); import make_env, os\n"
        f"make_env.ROOT = make_env.VENV = {str(tmp_path)!r}; make_env.VENV_PYTHON = sys.executable\n"
        "make_env.fingerprint = lambda kind: kind + os.environ['WHICH']\n"
        "make_env.check_machine = lambda: None\n"
        "make_env.make_venv = lambda: print('venv', end=' '); make_env.install = lambda kind: print(kind, end=' ')\n"
        "for kind in sys.argv[1:]: sys.argv = ['x', kind]; make_env.main()\n"
    )

    def done(which: str, *kinds: str) -> str:
        command = [sys.executable, "-c", code, *kinds]
        environment = dict(os.environ, WHICH=which)
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60).stdout

    assert done("1", "base", "dev", "base", "dev") == "venv base dev "
    assert done("2", "dev", "base") == "venv dev "


def test_set_up_without_compiler_leaves_the_engine_out(tmp_path: Path) -> None:
    code = (
        f"import sys, os; sys.path.insert(0, {str(ROOT / 'tools')!r})\n"
        "import make_env; make_env.check_machine(); print(os.environ['MEGAMOE_SKIP_HOST_BUILD'])"
    )
    environment = dict(os.environ, CXX="no-such-compiler")
    environment.pop("MEGAMOE_SKIP_HOST_BUILD", None)
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "1"
    assert "install g++" in done.stderr and len(done.stderr.strip().splitlines()) == 1
