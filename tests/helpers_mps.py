"""A multi-process service (MPS) of the test's own: ranks that share a GPU run on it at the same time, not by turns."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

__all__ = ["own_mps"]

_START_S = 10.0


@contextlib.contextmanager
def own_mps() -> Iterator[dict[str, str]]:
    """Run a control daemon on pipes of its own; yield the variables by which processes use it. Skips without one."""
    control = shutil.which("nvidia-cuda-mps-control")
    if control is None:
        pytest.skip("nvidia-cuda-mps-control is not installed")
    with tempfile.TemporaryDirectory(prefix="megamoe-mps-") as folder:
        variables = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        environment = {**os.environ, **variables}
        daemon = subprocess.Popen(
            [control, "-f"],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            deadline = time.monotonic() + _START_S
            while not (Path(folder) / "control").exists() and daemon.poll() is None and time.monotonic() < deadline:
                time.sleep(0.05)
            if daemon.poll() is not None or not (Path(folder) / "control").exists():
                log = Path(folder) / "control.log"
                pytest.skip(f"MPS did not start: {log.read_text()[-300:] if log.exists() else 'it left no log'}")
            yield variables
        finally:
            if daemon.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    subprocess.run([control], input=b"quit\n", env=environment, capture_output=True, timeout=15)
                    daemon.wait(timeout=15)
            if daemon.poll() is None:
                daemon.kill()
                daemon.wait()
