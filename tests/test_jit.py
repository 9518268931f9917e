"""The JIT without a GPU: keys, cache, many processes, damaged entries; compilation where NVRTC is installed."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path

import pytest

from megamoe.kernels.jit import JitError, JitSettings, KernelSource, Usage, build
from megamoe.kernels.jit.cache import CubinCache
from megamoe.kernels.jit.compiler import parse_usage
from megamoe.kernels.jit.source import own_headers

ROOT = Path(__file__).resolve().parents[1]
USAGE = Usage(40, 0, 0, 0, 0)
SCALE = """
extern "C" __global__ void scale(float* x, float factor, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] *= factor;
}
"""
REASON = "cuda.core with NVRTC is not installed (megamoe[cuda13])"


def kernel(text: str = SCALE, name: str = "scale") -> KernelSource:
    return KernelSource(name=name, code=text, entry="scale")


def settings(*folders: Path, **changes: object) -> JitSettings:
    pytest.importorskip("cuda.core", reason=REASON)
    pytest.importorskip("cuda.bindings.nvrtc", reason=REASON)
    return JitSettings(cache_dirs=folders, **changes)  # type: ignore[arg-type]


def forget() -> None:
    """Drop what this process remembers, as a new process would."""
    import_module("megamoe.kernels.jit.build")._in_memory.clear()


def test_compiles_and_reports_usage(tmp_path: Path) -> None:
    forget()
    first = build(kernel(), settings(tmp_path))
    assert first.was_compiled and first.cubin[:4] == b"\x7fELF"
    assert 4 <= first.usage.registers <= 64 and first.usage.is_clean
    forget()
    second = build(kernel(), settings(tmp_path))
    assert not second.was_compiled and second.cubin == first.cubin and second.usage == first.usage


def test_kernels_are_compiled_side_by_side(tmp_path: Path) -> None:
    """One compilation for each kernel, however many threads ask; another kernel does not wait for it."""
    forget()
    chosen = settings(tmp_path)
    asked = [kernel(SCALE.replace("factor;", f"factor + {i % 2};")) for i in range(6)]
    with ThreadPoolExecutor(6) as pool:
        built = list(pool.map(lambda source: build(source, chosen), asked))
    assert sum(artifact.was_compiled for artifact in built) == 2
    assert built[0].cubin == built[2].cubin == built[4].cubin != built[1].cubin == built[3].cubin == built[5].cubin


def test_key_follows_contents_only() -> None:
    base = kernel().key(("-std=c++20",), "nvrtc-13.0")
    assert base == kernel(name="other").key(("-std=c++20",), "nvrtc-13.0")
    assert base != kernel(SCALE + " ").key(("-std=c++20",), "nvrtc-13.0")
    assert base != kernel().key(("-std=c++17",), "nvrtc-13.0")
    assert base != kernel().key(("-std=c++20",), "nvrtc-13.5")


def test_headers_are_followed_and_must_be_written_the_standard_way(tmp_path: Path) -> None:
    (tmp_path / "megamoe").mkdir()
    (tmp_path / "megamoe" / "a.cuh").write_text('#include "megamoe/b.cuh"\n#include <stdint.h>\n')
    (tmp_path / "megamoe" / "b.cuh").write_text("// b\n")
    assert set(own_headers('#include "megamoe/a.cuh"  // why\n', tmp_path)) == {"megamoe/a.cuh", "megamoe/b.cuh"}
    with pytest.raises(ValueError, match="own headers are included as"):
        own_headers("#include <megamoe/a.cuh>\n", tmp_path)
    with pytest.raises(ValueError, match="own headers are included as"):
        own_headers("#include MEGAMOE_HEADER\n", tmp_path)
    with pytest.raises(ValueError, match="does not exist"):
        own_headers('#include "megamoe/c.cuh"\n', tmp_path)


def test_a_refused_source_shows_the_log(tmp_path: Path) -> None:
    with pytest.raises(JitError, match="undefined_thing"):
        build(kernel(SCALE.replace("factor;", "undefined_thing;")), settings(tmp_path))


def test_check_refuses_local_memory(tmp_path: Path) -> None:
    text = """
extern "C" __global__ void scale(float* x, float factor, int n) {
    float a[64];
    for (int i = 0; i < n; ++i) a[(i * 7 + n) % 64] = x[i];
    for (int i = 0; i < n; ++i) x[i] = a[(n + i * 3) % 64] * factor;
}
"""
    assert build(kernel(text), settings(tmp_path)).usage.stack_bytes >= 256
    with pytest.raises(JitError, match="spills or uses local memory"):
        build(kernel(text), settings(tmp_path, check=True))


def test_parse_usage_refuses_an_unknown_log() -> None:
    with pytest.raises(JitError, match="names no resources"):
        parse_usage("ptxas info : nothing", "scale")


def test_parse_usage_tells_of_products_that_wait_for_each_other() -> None:
    log = """ptxas info    : (C7519) Potential Performance Loss: wgmma.mma_async instructions are serialized
ptxas info    : Compiling entry function 'one' for 'sm_90a'
ptxas info    : Function properties for one
    0 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers
"""
    assert parse_usage(log, "one") == Usage(168, 0, 0, 8, 4, 0)
    remark = "wgmma.mma_async instructions are serialized due to registers in the function 'one' in line 12\n"
    assert parse_usage(remark + log, "one").serialized == 1
    assert parse_usage(remark.replace("'one'", "'other'") + log, "one").serialized == 0


@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "text"])
def test_damaged_entry_is_rebuilt(damage: str, tmp_path: Path) -> None:
    forget()
    first = build(kernel(), settings(tmp_path))
    (path,) = tmp_path.glob("*/*.cubin")
    data = bytearray(path.read_bytes())
    if damage == "cut":
        data = data[: len(data) // 2]
    elif damage == "flip":
        data[-10] ^= 0xFF
    elif damage == "empty":
        data = bytearray()
    else:
        data = bytearray(b"not an entry")
    path.write_bytes(data)
    forget()
    again = build(kernel(), settings(tmp_path))
    assert again.was_compiled and again.cubin == first.cubin
    forget()
    assert not build(kernel(), settings(tmp_path)).was_compiled


def test_read_only_folder_is_read_and_misses_go_elsewhere(tmp_path: Path) -> None:
    shipped, own = tmp_path / "shipped", tmp_path / "own"
    forget()
    build(kernel(), settings(shipped))
    # A file where the folder should be stands for "cannot be written", also for root.
    blocked = tmp_path / "blocked"
    blocked.write_text("")
    forget()
    assert not build(kernel(), settings(blocked, shipped)).was_compiled
    forget()
    other = kernel(SCALE.replace("*=", "+="))
    assert build(other, settings(blocked, own)).was_compiled
    assert list(own.glob("*/*.cubin"))
    forget()
    assert build(other, settings(blocked)).was_compiled  # in memory only
    assert not build(other, settings(blocked)).was_compiled


def test_missing_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("MEGAMOE_CACHE_DIR", raising=False)
    folders = JitSettings.from_env().cache_dirs
    assert len(folders) == 1 and str(os.getuid()) in folders[0].name
    monkeypatch.setenv("MEGAMOE_CACHE_DIR", f"{tmp_path}/a:{tmp_path}/b")
    assert JitSettings.from_env().cache_dirs == (tmp_path / "a", tmp_path / "b")


def test_rename_that_fails_with_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = CubinCache((tmp_path,))
    cache.put("k", "ab12", b"payload", USAGE)

    def refuse(*_: object) -> None:
        raise FileExistsError("exists")

    monkeypatch.setattr(os, "replace", refuse)
    assert cache.put("k", "ab12", b"payload", USAGE) is not None
    assert cache.put("k", "cd34", b"payload", USAGE) is None
    assert not [p for p in tmp_path.rglob(".*") if p.is_file()], "temporary files stay behind"


def test_stale_lock_of_a_dead_process(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from megamoe.kernels.jit.cache import CubinCache\n"
        f"with CubinCache((Path({str(tmp_path)!r}),)).lock('k', 'ab12') as held:\n"
        "    print(held, flush=True); time.sleep(60)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert child.stdout is not None and child.stdout.readline().strip() == "True"
        short = CubinCache((tmp_path,), lock_timeout_s=0.2)
        with short.lock("k", "ab12") as held:
            assert not held  # bounded, and the caller goes on
    finally:
        child.kill()
        child.wait(timeout=10)
    start = time.monotonic()
    with CubinCache((tmp_path,)).lock("k", "ab12") as held:
        assert held
    assert time.monotonic() - start < 5


def test_eight_processes_compile_each_kernel_once(tmp_path: Path) -> None:
    settings(tmp_path)  # skips without NVRTC
    code = (
        "import sys; from megamoe.kernels.jit import KernelSource, build\n"
        f"text = {SCALE!r}\n"
        "made = [build(KernelSource(f'scale{i}', text + '// ' + str(i), 'scale')).was_compiled for i in range(3)]\n"
        "print(sum(made))\n"
    )
    environment = dict(os.environ, MEGAMOE_CACHE_DIR=str(tmp_path))
    children = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=environment,
        )
        for _ in range(8)
    ]
    results = [child.communicate(timeout=120) for child in children]
    assert all(child.returncode == 0 for child in children), results
    assert sum(int(out) for out, _ in results) == 3
    assert len(list(tmp_path.glob("*/*.cubin"))) == 3


def test_same_key_from_another_place(tmp_path: Path) -> None:
    """The checkout at another path finds the same entries."""
    forget()
    build(kernel(), settings(tmp_path))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.symlink_to(ROOT)
    code = (
        "from megamoe.kernels.jit import KernelSource, build\n"
        f"print(build(KernelSource('scale', {SCALE!r}, 'scale')).was_compiled)\n"
    )
    environment = dict(os.environ, MEGAMOE_CACHE_DIR=str(tmp_path), PYTHONPATH=str(elsewhere))
    for name in ("CUDA_HOME", "CUDA_PATH"):
        environment.pop(name, None)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=60
    )
    assert done.stdout.strip() == "False", done.stderr


def test_import_needs_no_cuda() -> None:
    code = (
        "import sys\nsys.modules['cuda'] = None\n"
        "import megamoe.kernels.jit as jit\n"
        "try: jit.build(jit.KernelSource('k', '', 'k'))\n"
        "except jit.JitError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert "megamoe[cuda13]" in done.stdout, done.stdout + done.stderr


def try_nvrtc(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / "try_nvrtc.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)


def test_first_use_by_many_threads(tmp_path: Path) -> None:
    """The import of cuda.core is not made for two threads: the second saw a package without its names."""
    settings(tmp_path)  # skips without NVRTC
    code = """
        import sys, threading
        sys.setswitchinterval(1e-6)
        from megamoe.kernels.jit.compiler import cuda_core, find_compiler
        from megamoe.kernels.jit.settings import JitSettings
        start, seen = threading.Barrier(16), []
        def use(number):
            start.wait()
            if number % 2:
                cuda_core().ObjectCode
            seen.append(find_compiler(JitSettings()))
        threads = [threading.Thread(target=use, args=(number,)) for number in range(16)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        assert len(seen) == 16 and len(set(map(id, seen))) == 1, seen
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=120)


def test_a_named_nvrtc_compiles_a_kernel(tmp_path: Path) -> None:
    settings(tmp_path)  # skips without NVRTC
    pathfinder = pytest.importorskip("cuda.pathfinder")
    installed = pathfinder.load_nvidia_dynamic_lib("nvrtc").abs_path
    done = try_nvrtc("--library", installed, "--only", "fp4_token_rs_8x256")
    assert done.returncode == 0, done.stdout + done.stderr
    version, kernel = done.stdout.splitlines()
    assert version.startswith("nvrtc-1") and kernel.startswith("sm90_grouped_gemm_fp4_token_rs_8x256: 96 registers")
    assert kernel.endswith("clean")


def test_an_nvrtc_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    done = try_nvrtc("--library", str(tmp_path / "libnvrtc.so.12"))
    assert done.returncode == 2 and "--library:" in done.stderr.splitlines()[-1] and "Traceback" not in done.stderr
