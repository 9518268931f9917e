"""Compile the Hopper GEMM kernels with the NVRTC at hand, or with a named one, and print what each takes; needs no GPU.

    python tools/try_nvrtc.py [--library PATH/libnvrtc.so.12] [--only TEXT]

A library can be named that has the major version of the installed cuda-bindings: those load `libnvrtc.so.<major>`, and
find it loaded. Nothing is read from or written to a cache. Exit code 1 if a kernel is refused, spills or uses local
memory. Needs cuda-core, not torch.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from megamoe.kernels.gemm_instances import all_sources  # noqa: E402
from megamoe.kernels.jit import JitError, JitSettings  # noqa: E402
from megamoe.kernels.jit.compiler import find_compiler  # noqa: E402


def main() -> int:
    """Compile and print a line for each kernel."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--library", metavar="PATH", help="the libnvrtc to use")
    parser.add_argument("--only", default="", help="only kernels whose name has this text")
    arguments = parser.parse_args()
    if arguments.library:
        try:
            for builtins in Path(arguments.library).parent.glob("libnvrtc-builtins.so*"):
                ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)  # 13.0 does not look beside itself
            ctypes.CDLL(arguments.library, mode=ctypes.RTLD_GLOBAL)
        except OSError as error:
            parser.error(f"--library: {error}")
    settings = JitSettings(cache_dirs=())
    compiler = find_compiler(settings)
    print(compiler.identity, flush=True)
    failed = 0
    for source in all_sources():
        if arguments.only not in source.name:
            continue
        start = time.perf_counter()
        try:
            _, usage = compiler.compile(source, settings)
        except JitError as error:
            print(f"{source.name}: refused: {error}")
            failed += 1
            continue
        failed += not usage.is_clean
        state = "clean" if usage.is_clean else f"NOT CLEAN {usage.to_dict()}"
        seconds = time.perf_counter() - start
        print(f"{source.name}: {usage.registers} registers, {seconds:.1f} s, {state}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
