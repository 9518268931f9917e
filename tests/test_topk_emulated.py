"""The top-k kernel itself, thread by thread on a CPU: right columns, barriers that all reach, loads within the rows."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from helpers_emulated import NO_COMPILER, compile_emulated  # noqa: E402
from helpers_topk import strange_rows  # noqa: E402

from megamoe.kernels import topk  # noqa: E402
from megamoe.kernels.topk import TopkInstance, select_instance, topk_indices  # noqa: E402

pytestmark = NO_COMPILER
POISON = -77


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    instance, bf16 = (select_instance(dtype, topk._CLUSTER, False) for dtype in (torch.float32, torch.bfloat16))
    sizes = {
        "THREADS": instance.threads,
        "CAPACITY": instance.capacity,
        "CLUSTER": instance.cluster,
        "FP32_VECTORS": instance.vectors,
        "BF16_VECTORS": bf16.vectors,
    }
    return compile_emulated(tmp_path_factory.mktemp("emulated"), "topk.cpp", sizes, ("run_topk",))


@pytest.fixture
def emulate(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> Callable[..., torch.Tensor]:
    """Return a function like `topk_indices` whose launches the CPU runs; `shared`: by a cluster of blocks."""

    def call(x: torch.Tensor, k: int, *windows: torch.Tensor, ordered: bool, shared: bool, seed: int) -> torch.Tensor:
        def launch(instance: TopkInstance, _source: object, _device: object, grid: int, *rest: object) -> None:
            _, layout, values = rest
            args = layout.pack(*values)  # type: ignore[attr-defined]
            for row in range(grid // instance.cluster):
                failure = library.run_topk(args, x.dtype == torch.bfloat16, shared, ordered, row, seed)
                assert failure is None, failure

        monkeypatch.setattr(topk, "launch_packed", launch)
        out = torch.full((x.shape[0], k + 2), POISON, dtype=torch.int32)
        instance = select_instance(x.dtype, topk._CLUSTER if shared else 1, ordered)
        starts, ends = windows or (None, None)
        topk._launch(instance, x, k, starts, ends, None, out[:, 1:-1])
        assert bool((out[:, 0] == POISON).all()) and bool((out[:, -1] == POISON).all())
        return out[:, 1:-1]

    return call


def check(
    emulate: Callable[..., torch.Tensor],
    x: torch.Tensor,
    k: int,
    *windows: torch.Tensor,
    shared: bool,
    seed: int = 0,
) -> None:
    expected = topk_indices(x, k, *windows, deterministic=True)
    missing = 1 << 30
    found = emulate(x, k, *windows, ordered=True, shared=shared, seed=seed)
    assert torch.equal(found, expected)
    found = emulate(x, k, *windows, ordered=False, shared=shared, seed=seed)
    assert torch.equal(found < 0, expected < 0)
    found = found.masked_fill(found < 0, missing).sort(dim=1).values
    assert torch.equal(found.masked_fill(found == missing, -1), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_strange_rows(emulate: Callable[..., torch.Tensor], dtype: torch.dtype) -> None:
    x = strange_rows(6203).to(dtype)  # more than the candidates that fit
    check(emulate, x, 2048, shared=False)
    check(emulate, x[2::9], 300, shared=False, seed=3)
    check(emulate, x[2::6], 2048, shared=True)


def test_windows(emulate: Callable[..., torch.Tensor]) -> None:
    x = torch.randn(6, 20011, generator=torch.Generator().manual_seed(1))
    starts = torch.tensor([0, 7, 20011, 11, -3, 9001], dtype=torch.int32)
    ends = torch.tensor([20050, 7, 20011, 3, 12345, 20010], dtype=torch.int32)
    check(emulate, x, 2048, starts, ends, shared=False, seed=5)
    low, high = -(2**31), 2**31 - 1
    starts_far = torch.tensor([low, 20000, high, low, high, 5], dtype=torch.int32)
    ends_far = torch.tensor([high, low, low, low, high, low + 4], dtype=torch.int32)
    check(emulate, x, 100, starts_far, ends_far, shared=False)
    check(emulate, x[-2:], 2048, starts[-2:], ends[-2:], shared=True)


@pytest.mark.parametrize("size", [4, 2], ids=["fp32", "bf16"])
def test_nothing_beside_the_rows_is_read(emulate: Callable[..., torch.Tensor], size: int) -> None:
    """Rows lie at the end, and at the beginning, of memory whose neighbouring pages end the process."""
    page, dtype = mmap.PAGESIZE, torch.float32 if size == 4 else torch.bfloat16
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for columns in (1, 6147, 9001):
        inner = -(-columns * size // page) * page
        memory = mmap.mmap(-1, inner + 2 * page)
        everything = torch.frombuffer(memory, dtype=torch.uint8)
        address = everything.data_ptr()
        values = torch.randn(1, columns).to(dtype)
        assert protect(address, page, 0) == 0 and protect(address + page + inner, page, 0) == 0
        for first in (page, page + inner - columns * size):
            x = everything[first : first + columns * size].view(dtype).view(1, columns)
            x.copy_(values)
            for shared in (False, True):
                found = emulate(x, 100, ordered=True, shared=shared, seed=0)
                assert torch.equal(found, topk_indices(values, 100, deterministic=True))
        assert protect(address, inner + 2 * page, mmap.PROT_READ | mmap.PROT_WRITE) == 0


def test_a_barrier_that_some_threads_miss_is_reported(tmp_path: Path) -> None:
    program = """
#include "cuda_on_cpu.h"
extern "C" const char* run(int which) {
    return emulated::run(1, 64, 16, 0, 0, [=] {
        if (which == 0 && threadIdx.x == 5) return;
        if (which == 1 && threadIdx.x < 7) __any_sync(~0u, true);
        if (which == 1 && threadIdx.x >= 7) __ballot_sync(~0u, true);
        __syncthreads();
    });
}
"""
    (tmp_path / "missing.cpp").write_text(program)
    run = compile_emulated(tmp_path, tmp_path / "missing.cpp").run
    run.restype = ctypes.c_char_p
    assert run(0) == b"threads wait for others that never arrive"
    assert run(1) == b"lanes of a warp meet in different operations"
    assert run(2) is None
