"""The protocol under ThreadSanitizer, AddressSanitizer and UBSan; and what happens when a release is left out."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

RUN = Path(__file__).with_name("sanitize") / "run.py"


def _load() -> Any:
    spec = importlib.util.spec_from_file_location("sanitize_run", RUN)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


run = _load()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(platform.machine() != "x86_64", reason="the sanitizer runs are set up for x86-64"),
    pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="no C++ compiler"),
]


@pytest.fixture(scope="module")
def thread_builder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run.Builder(tmp_path_factory.mktemp("thread"), "thread")


def test_thread_sanitizer_is_silent(thread_builder: Any) -> None:
    code, text = run.run_stress(thread_builder.program(), rounds=30)
    assert code == 0, text


@pytest.mark.parametrize("number", range(1, len(run.EDGES) + 1), ids=run.EDGES)
def test_every_release_is_needed(thread_builder: Any, number: int) -> None:
    """Each line of the ordering table, weakened alone, is found by ThreadSanitizer or by a wrong result."""
    for seed in range(1, 6):  # on a busy machine threads may miss each other in one run
        code, text = run.run_stress(thread_builder.program(number), rounds=20, seed=seed)
        if code != 0:
            break
    print(text.splitlines()[1] if code else "")
    assert code != 0, f"nothing noticed that the release of {run.EDGES[number - 1]} was gone"


def test_address_and_undefined_behaviour_sanitizers_are_silent(tmp_path: Path) -> None:
    code, text = run.run_stress(run.Builder(tmp_path, "address").program(), rounds=30)
    assert code == 0, text


def test_the_edges_are_those_of_the_source() -> None:
    source = (run.HOST / "sync.h").read_text()
    for number, edge in enumerate(run.EDGES, 1):
        assert f"{edge} = {number}," in source
    assert f"= {len(run.EDGES) + 1}," not in source.split("enum class Edge")[1].split("};")[0]
