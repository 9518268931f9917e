"""`megamoe doctor` looks everywhere, breaks nowhere, and names the remedy."""

from __future__ import annotations

import subprocess
import sys

import pytest
from helpers_launch import ROOT, environment, megamoe

# Hides a package as if it were not installed, also from a finder.
_HIDE = """
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {names!r}:
            raise ModuleNotFoundError("No module named " + repr(name), name=name)
sys.meta_path.insert(0, Hidden())
from megamoe.cli import main
sys.exit(main(["doctor"]))
"""


def doctor_without(*names: str) -> subprocess.CompletedProcess[str]:
    code = _HIDE.format(names=names)
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=90
    )


def test_doctor_finds_a_backend_here() -> None:
    done = megamoe("doctor")
    assert done.returncode == 0, done.stdout + done.stderr
    for row in (
        "Python",
        "torch",
        "GPU",
        "cuda-core",
        "NVRTC",
        "comm symm_mem",
        "comm nvshmem",
        "/dev/shm",
        "C++ compiler",
    ):
        assert row in done.stdout, row
    for backend in ("sm90", "cpu", "reference"):
        assert f"backend {backend}" in done.stdout
    assert "kernel.backend=auto takes it" in done.stdout


def test_without_torch_doctor_exits_1_and_names_the_remedy() -> None:
    done = doctor_without("torch")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "pip install 'torch>=2.9'" in done.stderr and "Traceback" not in done.stderr
    assert "MISSING" in done.stdout and "/dev/shm" in done.stdout


@pytest.mark.parametrize("hidden", [("numpy",), ("rich",), ("torch", "rich", "cuda", "yaml", "numpy")])
def test_without_other_packages_doctor_still_answers(hidden: tuple[str, ...]) -> None:
    done = doctor_without(*hidden)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert "pip install" in done.stdout + done.stderr


def test_versions_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    from megamoe.launch import doctor

    def torch(version: str) -> SimpleNamespace:
        return SimpleNamespace(__version__=version, version=SimpleNamespace(cuda=None))

    assert doctor._torch(torch("2.8.1+cpu"), "").status == "MISSING"
    assert doctor._torch(torch("2.10.0"), "").status == "ok"
    nvrtc = SimpleNamespace(nvrtcVersion=lambda: (0, 13, 2))
    real = doctor._import
    monkeypatch.setattr(doctor, "_import", lambda name: (nvrtc, "") if name == "cuda.bindings.nvrtc" else real(name))
    newer = doctor._jit(True, (12, 8))[1]
    assert newer.status == "MISSING" and newer.remedy == "pip install 'megamoe[cuda12]'"
    assert doctor._jit(True, (13, 0))[1].status == "ok"


def test_comm_backends_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    from megamoe.launch import doctor

    modules: dict[str, object] = {}
    monkeypatch.setattr(doctor, "_import", lambda name: (modules.get(name), "" if name in modules else "no module"))
    torch = SimpleNamespace(version=SimpleNamespace(cuda="12.8"), device=lambda *where: where)
    variable = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
    monkeypatch.delenv(variable, raising=False)

    assert doctor._symm_mem(torch, False).status == "-"
    assert doctor._symm_mem(torch, True).status == "MISSING"
    modules["torch.distributed._symmetric_memory"] = SimpleNamespace(get_backend=lambda device: "CUDA")
    found = doctor._symm_mem(torch, True)
    assert found.status == "ok" and f"need {variable}=1" in found.detail
    monkeypatch.setenv(variable, "1")
    assert "on one GPU: allowed" in doctor._symm_mem(torch, True).detail
    modules["torch.distributed._symmetric_memory"] = SimpleNamespace(get_backend=lambda device: "NVSHMEM")
    found = doctor._symm_mem(torch, True)
    assert found.status == "MISSING" and found.remedy == "unset TORCH_SYMMMEM"

    monkeypatch.setattr(doctor, "_version", lambda *packages: None)
    assert doctor._nvshmem(torch, True).remedy == "pip install 'megamoe[nvshmem12]'"
    monkeypatch.setattr(doctor, "_version", lambda *packages: "nvshmem4py-cu12 0.4.1")
    assert doctor._nvshmem(torch, True).status == "MISSING"

    def no_library() -> object:
        raise RuntimeError("libnvshmem_host.so.3 not found")

    modules["nvshmem.core"] = SimpleNamespace(get_version=no_library)
    found = doctor._nvshmem(torch, True)
    assert found.status == "MISSING" and "libnvshmem_host.so.3" in found.detail
    version = SimpleNamespace(libnvshmem_version="3.4.5")
    modules["nvshmem.core"] = SimpleNamespace(get_version=lambda: version)
    assert doctor._nvshmem(torch, True).detail == "nvshmem4py-cu12 0.4.1, libnvshmem 3.4.5"
