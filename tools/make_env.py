"""Prepare `.venv` in the checkout: pick an interpreter, reuse its torch or fetch one, install megamoe in editable form.

Usage: python tools/make_env.py base|dev|gpu

The interpreter that runs this file is the chosen one (`PYTHON=` of the Makefile, else python3). If it imports
torch >= 2.9, `.venv` sees its packages and no torch is fetched. Environment: TORCH is the requirement to install
(default "torch>=2.9"), TORCH_INDEX another package index for it.

Written for any Python 3, so that an old one gets a sentence and not a syntax error.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
VENV = os.path.join(ROOT, ".venv")
VENV_PYTHON = os.path.join(VENV, "bin", "python")
EXTRAS = {"base": "", "dev": "[dev]", "gpu": ""}
BUILD_TOOLS = ("setuptools>=77", "pybind11>=2.13", "ninja")


def say(text):
    sys.stderr.write("megamoe: {}\n".format(text))
    sys.stderr.flush()


def fail(text):
    say(text)
    sys.exit(1)


def runs(python, code):
    """Return the output of a snippet, or None when it fails."""
    try:
        done = subprocess.run([python, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=180)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode().strip() if done.returncode == 0 else None


def torch_of(python):
    """Return the torch version that an interpreter imports if it is at least 2.9, else None."""
    version = runs(python, "import torch; print(torch.__version__)")
    if version is None:
        return None
    try:
        major, minor = (int(part) for part in version.split(".")[:2])
    except ValueError:
        return None
    return version if (major, minor) >= (2, 9) else None


def has_build_tools(python):
    code = (
        "import pybind11, setuptools, ninja\n"
        "assert tuple(map(int, setuptools.__version__.split('.')[:1])) >= (77,)\n"
        "assert tuple(map(int, pybind11.__version__.split('.')[:2])) >= (2, 13)"
    )
    return runs(python, code) is not None


def has_gpu():
    return os.path.exists("/dev/nvidia0") or shutil.which("nvidia-smi") is not None


def pip(*arguments):
    return subprocess.call([VENV_PYTHON, "-m", "pip", "install", "--disable-pip-version-check", "-q"] + list(arguments))


def check_machine():
    """Refuse what cannot work and say what will be missing, one sentence each."""
    if sys.version_info < (3, 10):
        fail(
            "Python 3.10 or newer is needed, this is {}.{} ({}); pass PYTHON=/path/to/python3.10".format(
                sys.version_info[0], sys.version_info[1], sys.executable
            )
        )
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError:
        fail("this Python cannot make virtual environments; install python3-venv (Debian, Ubuntu) or pass PYTHON=")
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        say(
            "no g++ found, so the C++ engine is left out and the slower 'reference' backend runs; install g++ to get it"
        )
        os.environ["MEGAMOE_SKIP_HOST_BUILD"] = "1"
    elif not os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")):
        say(
            "no Python.h found, so the C++ engine is left out and the slower 'reference' backend runs; "
            "install python3-dev to get it"
        )
        os.environ["MEGAMOE_SKIP_HOST_BUILD"] = "1"


def fingerprint(kind):
    """Everything that decides whether an existing .venv is still the right one."""
    digest = hashlib.sha256()
    for name in ("pyproject.toml", "setup.py", "tools/make_env.py"):
        with open(os.path.join(ROOT, name), "rb") as handle:
            digest.update(handle.read())
    for folder, _, names in sorted(os.walk(os.path.join(ROOT, "kernels"))):
        for name in sorted(names):
            if name.endswith((".cpp", ".h", ".hpp")) and os.sep + "build" not in folder:
                with open(os.path.join(folder, name), "rb") as handle:
                    digest.update(handle.read())
    for text in (
        kind,
        sys.executable,
        sys.version,
        os.environ.get("TORCH", ""),
        os.environ.get("TORCH_INDEX", ""),
        os.environ.get("MEGAMOE_SKIP_HOST_BUILD", ""),
    ):
        digest.update(text.encode())
    return digest.hexdigest()


def stamp_path(kind):
    return os.path.join(VENV, "megamoe-{}.stamp".format(kind))


def up_to_date(kind):
    # A development environment also serves the quickstart.
    for known in {"base": ("base", "dev"), "dev": ("dev",), "gpu": ("gpu", "dev")}[kind]:
        try:
            with open(stamp_path(known)) as handle:
                if handle.read() == fingerprint(known) and os.path.exists(VENV_PYTHON):
                    return True
        except OSError:
            pass
    return False


def install_torch():
    spec = os.environ.get("TORCH") or "torch>=2.9"
    index = os.environ.get("TORCH_INDEX")
    if not index and not has_gpu() and not os.environ.get("TORCH"):
        say(
            "no NVIDIA GPU here, and pip's default torch for x86-64 is a CUDA build of about 3 GB; for the CPU build "
            "(about 0.2 GB) stop and pass TORCH_INDEX=<address of PyTorch's CPU wheel index>"
        )
    say("installing {} into .venv".format(spec))
    if pip(*(["--index-url", index] if index else []), spec) != 0:
        fail("torch could not be installed; pass PYTHON= of an interpreter that has torch >= 2.9, or TORCH_INDEX=")


def install_offline():
    """No package index in reach: run from the checkout, which the committed links allow."""
    site = runs(VENV_PYTHON, "import sysconfig; print(sysconfig.get_paths()['purelib'])")
    if site is None:
        fail(".venv is broken; remove it and try again")
    with open(os.path.join(site, "megamoe-checkout.pth"), "w") as handle:
        handle.write(ROOT + "\n")
    script = os.path.join(VENV, "bin", "megamoe")
    with open(script, "w") as handle:
        handle.write("#!{}\nimport sys\nfrom megamoe.cli import main\nsys.exit(main())\n".format(VENV_PYTHON))
    os.chmod(script, 0o755)
    if not os.environ.get("MEGAMOE_SKIP_HOST_BUILD") and has_build_tools(VENV_PYTHON):
        subprocess.call([VENV_PYTHON, "setup.py", "-q", "build_ext", "--inplace"], cwd=ROOT)


def make_venv():
    """Make `.venv` anew, with a torch in it."""
    system_torch = torch_of(sys.executable)
    if os.path.isdir(VENV):
        shutil.rmtree(VENV)
    command = [sys.executable, "-m", "venv", VENV]
    if system_torch:
        say("using torch {} of {}".format(system_torch, sys.executable))
        command.append("--system-site-packages")
    if subprocess.call(command) != 0:
        fail("python -m venv failed; install python3-venv (Debian, Ubuntu) or pass PYTHON=")
    if system_torch and torch_of(VENV_PYTHON) is None:
        # The interpreter is itself a virtual environment: its packages are not the base interpreter's.
        site = runs(sys.executable, "import sysconfig; print(sysconfig.get_paths()['purelib'])")
        ours = runs(VENV_PYTHON, "import sysconfig; print(sysconfig.get_paths()['purelib'])")
        if site and ours:
            with open(os.path.join(ours, "parent-environment.pth"), "w") as handle:
                handle.write(site + "\n")
    if torch_of(VENV_PYTHON) is None:
        install_torch()


def install(kind):
    """Install megamoe, and what this kind of environment needs beside it, into `.venv`."""
    isolation = []
    if not has_build_tools(VENV_PYTHON):
        pip(*BUILD_TOOLS)
    if has_build_tools(VENV_PYTHON):
        isolation = ["--no-build-isolation"]
    say("installing megamoe into .venv")
    target = ROOT + EXTRAS[kind]
    if pip(*(isolation + ["-e", target])) != 0:
        if kind == "dev":
            fail("the packages for the tests could not be installed; is a package index in reach?")
        say("no package index in reach: running from the checkout")
        install_offline()


def main():
    kind = sys.argv[1] if len(sys.argv) == 2 and sys.argv[1] in EXTRAS else "base"
    check_machine()
    import fcntl

    # Two `make` at once: the second waits for the first and then finds the work done.
    with open(os.path.join(ROOT, ".venv.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not up_to_date(kind):
            if kind != "dev" or not up_to_date("base"):  # the quickstart's environment lacks the test packages alone
                make_venv()
            install(kind)
            with open(stamp_path(kind), "w") as handle:
                handle.write(fingerprint(kind))


if __name__ == "__main__":
    main()
