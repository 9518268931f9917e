"""The calls into libcuda, against a library of the same functions that writes down what it got."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from megamoe.kernels.jit import JitError, driver

# Signatures as cuda.h declares them.
LIBRARY = r"""
#include <stdint.h>
#include <string.h>
typedef struct {
    unsigned grid[3], block[3], shared_bytes;
    void* stream;
    void* attributes;
    unsigned num_attributes;
} Config;
Config config;
void *function, *extra;
char parameter[384];
int status;
uint64_t encoded[32];
const char* name = "CUDA_ERROR_OF_A_TEST";

int cuLaunchKernelEx(const Config* c, void* f, void** parameters, void** e) {
    config = *c, function = f, extra = e;
    memcpy(parameter, parameters[0], sizeof parameter);
    return status;
}
int cuTensorMapEncodeTiled(char* map, int type, uint32_t rank, void* address, const uint64_t* dims,
                           const uint64_t* strides, const uint32_t* box, const uint32_t* steps, int interleave,
                           int swizzle, int promotion, int fill) {
    uint64_t* e = encoded;
    *e++ = type, *e++ = rank, *e++ = (uintptr_t)address;
    for (uint32_t i = 0; i < rank; ++i) *e++ = dims[i];
    for (uint32_t i = 0; i + 1 < rank; ++i) *e++ = strides[i];
    for (uint32_t i = 0; i < rank; ++i) *e++ = box[i];
    for (uint32_t i = 0; i < rank; ++i) *e++ = steps[i];
    *e++ = interleave, *e++ = swizzle, *e++ = promotion, *e++ = fill;
    memset(map, 0xab, 128);
    return status;
}
int cuTensorMapReplaceAddress(void* map, void* address) {
    encoded[0] = (uintptr_t)map, encoded[1] = (uintptr_t)address;
    return status;
}
int cuGetErrorName(int s, const char** out) {
    *out = s == status ? name : 0;
    return 0;
}
"""


class Config(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("num_attributes", ctypes.c_uint),
    ]


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ctypes.CDLL]:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    source, target = tmp_path / "cuda.c", tmp_path / "libcuda.so.1"
    source.write_text(LIBRARY)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(target), str(source)], check=True, timeout=60)
    loaded = ctypes.CDLL(str(target))
    monkeypatch.setattr(driver.ctypes, "CDLL", lambda name: loaded)
    monkeypatch.setattr(driver, "_driver", None)
    yield loaded


def test_a_launch_gives_what_was_prepared(library: ctypes.CDLL) -> None:
    launch = driver.PreparedLaunch("kernel", 0x1234, 132, 384, 200_000, 384)
    assert launch.address % 64 == 0
    launch.bytes[:5] = b"first"
    launch(0)
    config = Config.in_dll(library, "config")
    assert (list(config.grid), list(config.block), config.shared_bytes) == ([132, 1, 1], [384, 1, 1], 200_000)
    assert (config.stream, config.attributes, config.num_attributes) == (None, None, 0)
    assert ctypes.c_void_p.in_dll(library, "function").value == 0x1234
    assert ctypes.c_void_p.in_dll(library, "extra").value is None
    assert bytes((ctypes.c_char * 384).in_dll(library, "parameter")) == b"first" + bytes(379)
    launch.bytes[:5] = b"other"
    for stream in (2**40 + 8, 2**40 + 8, 0):
        launch(stream)
        assert Config.in_dll(library, "config").stream == (stream or None)
    assert bytes((ctypes.c_char * 384).in_dll(library, "parameter"))[:5] == b"other"


def test_a_tensor_map_is_encoded_as_asked(library: ctypes.CDLL) -> None:
    launch = driver.PreparedLaunch("kernel", 1, 1, 1, 0, 384)
    dims, strides, box = (416, 2, 4, 4, 2**33), (416, 3328, 832, 2**40), (128, 2, 4, 4, 8)
    driver.get_driver().encode_tensor_map(launch.address + 128, 2**45 + 16, dims, strides, box)
    expected = [0, 5, 2**45 + 16, *dims, *strides, *box, 1, 1, 1, 1, 1, 0, 3, 3, 0]
    assert list((ctypes.c_uint64 * 32).in_dll(library, "encoded"))[: len(expected)] == expected
    assert launch.bytes[:] == bytes(128) + b"\xab" * 128 + bytes(128)
    driver.get_driver().replace_address(launch.address, 2**45)
    assert list((ctypes.c_uint64 * 32).in_dll(library, "encoded"))[:2] == [launch.address, 2**45]


def test_refusals_name_the_reason(library: ctypes.CDLL) -> None:
    launch = driver.PreparedLaunch("kernel", 1, 1, 1, 0, 384)
    ctypes.c_int.in_dll(library, "status").value = 719
    with pytest.raises(JitError, match="launch of kernel 'kernel' failed: CUDA_ERROR_OF_A_TEST"):
        launch(0)
    with pytest.raises(JitError, match=r"refused the tensor map of dims \(64, 2\).*: CUDA_ERROR_OF_A_TEST"):
        driver.get_driver().encode_tensor_map(launch.address, 16, (64, 2), (64,), (64, 2))
    with pytest.raises(JitError, match="refused address 0x11 .*: CUDA_ERROR_OF_A_TEST"):
        driver.get_driver().replace_address(launch.address, 17)
    assert driver.get_driver().error_name(3) == "3"


def test_without_a_driver_the_sentence_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(driver.ctypes, "CDLL", refuse)
    monkeypatch.setattr(driver, "_driver", None)
    with pytest.raises(JitError, match="no NVIDIA driver of CUDA 12 or newer was found: libcuda.so.1: cannot open"):
        driver.get_driver()


def test_the_numbers_are_those_of_the_bindings() -> None:
    bindings = pytest.importorskip("cuda.bindings.driver")
    for ours, enum, name in (
        (driver._UINT8, "CUtensorMapDataType", "CU_TENSOR_MAP_DATA_TYPE_UINT8"),
        (driver._NO_INTERLEAVE, "CUtensorMapInterleave", "CU_TENSOR_MAP_INTERLEAVE_NONE"),
        (driver._SWIZZLE_128B, "CUtensorMapSwizzle", "CU_TENSOR_MAP_SWIZZLE_128B"),
        (driver._L2_256B, "CUtensorMapL2promotion", "CU_TENSOR_MAP_L2_PROMOTION_L2_256B"),
        (driver._NO_FILL, "CUtensorMapFloatOOBfill", "CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE"),
    ):
        assert ours == int(getattr(getattr(bindings, enum), name))
