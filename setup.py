"""Everything declarative stands in pyproject.toml; here is the C++ engine, which an install can do without."""

from __future__ import annotations

import os
import sys
from glob import glob

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

HOST = "kernels/host"
SOURCES = ["module.cpp", "engine.cpp", "tasks.cpp", "pack.cpp", "isa_avx512.cpp", "isa_avx2.cpp", "isa_scalar.cpp"]
# No -march: isa_avx*.cpp name their own targets, everything else runs on any CPU. No contraction: bits must not depend
# on what the compiler fuses.
FLAGS = ["-std=c++20", "-O3", "-g0", "-ffp-contract=off", "-fvisibility=hidden", "-pthread"]


def skipped() -> bool:
    return os.environ.get("MEGAMOE_SKIP_HOST_BUILD", "0").strip().lower() not in ("", "0", "false", "no", "off")


def extensions() -> list[Extension]:
    if skipped():
        return []
    try:
        import pybind11
    except ImportError:
        print("megamoe: pybind11 is missing, installing without the C++ engine", file=sys.stderr)
        return []
    return [
        Extension(
            "megamoe._host",
            [f"{HOST}/{name}" for name in SOURCES],
            depends=[*glob(f"{HOST}/*.h"), *glob("kernels/include/megamoe/**/*.h", recursive=True)],
            include_dirs=[HOST, "kernels/include", pybind11.get_include()],
            extra_compile_args=FLAGS,
            extra_link_args=["-pthread"],
            language="c++",
        )
    ]


class OptionalBuild(build_ext):
    """Builds the engine; where that fails, says so in one line and goes on without it."""

    def run(self) -> None:
        try:
            super().run()
        except Exception as error:  # whatever a compiler or its absence raises
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            print(
                f"megamoe: installing without the C++ engine ({reason}); the reference backend remains", file=sys.stderr
            )
            self.extensions = []

    def get_outputs(self) -> list[str]:
        return [path for path in super().get_outputs() if os.path.exists(path)]


setup(ext_modules=extensions(), cmdclass={"build_ext": OptionalBuild})
