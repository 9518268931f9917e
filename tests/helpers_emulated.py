"""Kernels compiled for a CPU (tests/emulate), and the workspace of a rank that parts of the mega-kernel work on."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megamoe.config import MoESpec
from megamoe.kernels import mega_moe
from megamoe.kernels.jit.source import include_root

__all__ = ["NO_COMPILER", "SOURCES", "EmulatedRank", "compile_emulated"]

COMPILER = os.environ.get("CXX", "g++")
SOURCES = Path(__file__).with_name("emulate")
NO_COMPILER = pytest.mark.skipif(shutil.which(COMPILER) is None, reason="no C++ compiler")


def compile_emulated(
    folder: Path, source: str | Path, defines: Mapping[str, object] | None = None, functions: Iterable[str] = ()
) -> ctypes.CDLL:
    """Return the library of a C++ file, of tests/emulate unless its folder is named.

    Args:
        folder: where the library goes.
        source: the file.
        defines: macros.
        functions: those that give null, or as text what went wrong.
    """
    target = folder / f"{Path(source).stem}_{'_'.join(str(value) for value in (defines or {}).values())}.so"
    command = [COMPILER, "-std=c++20", "-O1", "-shared", "-fPIC", "-fno-strict-aliasing", "-ffp-contract=off", "-w"]
    command += ["-fwrapv"]  # what overflows wraps, as on the GPU
    command += [f"-D{key}={value}" for key, value in (defines or {}).items()]
    command += [f"-I{SOURCES}", f"-I{include_root()}", str(SOURCES / source), "-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-4000:]
    library = ctypes.CDLL(str(target))
    for function in functions:
        getattr(library, function).restype = ctypes.c_char_p
    return library


class EmulatedRank:
    """A rank's workspace and its tokens, with E4M3 rows and scales in place; ids of odd ranks have 32 bits."""

    def __init__(
        self, spec: MoESpec, limits: tuple[int, ...], tile: tuple[int, ...], rank: int, tokens: int, holes: float
    ) -> None:
        random = np.random.default_rng(rank)
        shape = mega_moe.layer_shape(spec)
        self.numbers = mega_moe.load_host().layout_from_numbers(limits, shape, tile)
        self.memory = np.full(self.numbers["bytes"] + 64, 0xEE, np.uint8)
        self.base = -(-self.memory.ctypes.data // 64) * 64
        self.memory[: self.numbers["control_bytes"] + 64] = 0
        self.ids = random.integers(0, spec.num_experts, (tokens, spec.top_k), np.int32 if rank % 2 else np.int64)
        hole = random.random(self.ids.shape) < holes
        least = np.iinfo(self.ids.dtype).min
        nobody = np.array([-1, least, 1 << 32, -(1 << 32), spec.num_experts])  # the low halves of three name expert 0
        nobody = nobody[[0, 1, 4]] if rank % 2 else nobody
        self.ids[hole] = random.choice(nobody, int(hole.sum()))
        self.weights = random.random((tokens, spec.top_k), np.float32)
        self.rows = self.view(self.numbers["input"], np.uint8, (tokens, shape[4]))
        self.rows[:] = random.integers(0, 256, self.rows.shape)
        self.scales = self.view(self.numbers["scales"], np.uint32, (tokens, shape[5] // 4))
        self.scales[:] = random.integers(0, 1 << 32, self.scales.shape)
        self.args = mega_moe._Args()
        self.args.base = self.base
        self.args.lay_out(limits, shape, tile)
        self.args.ids, self.args.id_bytes = self.ids.ctypes.data, self.ids.itemsize
        self.args.weights = self.weights.ctypes.data
        self.args.rank, self.args.num_tokens = rank, tokens
        self.args.num_local_experts = spec.num_experts // limits[0]

    def view(self, offset: int, dtype: Any, shape: tuple[int, ...]) -> Any:
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        start = self.base - self.memory.ctypes.data + offset
        return self.memory[start : start + size].view(dtype).reshape(shape)
