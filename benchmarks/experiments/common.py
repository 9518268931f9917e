"""Loads cubins, encodes tensor maps, times chilled and sustained."""

import ctypes
import time
from statistics import median

import torch
from cuda.bindings import driver as drv

torch.cuda.set_device(0)
torch.zeros(1, device="cuda")
DEV = "cuda"
BIG = None


def ok(r):
    assert int(r[0]) == 0, r[0]
    return r[1] if len(r) > 1 else None


def tensor_map(t, dims, strides, box, *, f32=False, swizzle=True):
    """dims/strides innermost first; strides in bytes for dims 1..; E4M3 bytes or FP32."""
    T = drv.CUtensorMapDataType
    m = ok(drv.cuTensorMapEncodeTiled(
        T.CU_TENSOR_MAP_DATA_TYPE_FLOAT32 if f32 else T.CU_TENSOR_MAP_DATA_TYPE_UINT8, len(dims), t.data_ptr(),
        [drv.cuuint64_t(d) for d in dims], [drv.cuuint64_t(s) for s in strides], [drv.cuuint32_t(b) for b in box],
        [drv.cuuint32_t(1)] * len(dims), drv.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        drv.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B if swizzle else drv.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_NONE,
        drv.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        drv.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE))
    return bytes(ctypes.string_at(m.getPtr(), 128))


class Kernel:
    def __init__(self, path, name="gemm", smem=0):
        self.mod = ok(drv.cuModuleLoadData(open(path, "rb").read()))
        self.f = ok(drv.cuModuleGetFunction(self.mod, name.encode()))
        self.smem = smem
        ok(drv.cuFuncSetAttribute(self.f, drv.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, smem))

    def bind(self, blob, grid, block):
        raw = ctypes.create_string_buffer(len(blob) + 64)
        addr = (ctypes.addressof(raw) + 63) // 64 * 64
        ctypes.memmove(addr, blob, len(blob))
        params = (ctypes.c_void_p * 1)(addr)
        s = torch.cuda.current_stream().cuda_stream

        def go():
            ok(drv.cuLaunchKernel(self.f, grid, 1, 1, block, 1, 1, self.smem, s, ctypes.addressof(params), 0))
        go.keep = (raw, params)
        return go


def wait(limit=4.0):
    """Synchronises, or ends the process (code 9) when the device does not answer: a hang costs seconds."""
    import os
    e = torch.cuda.Event(); e.record()
    t = time.time()
    while not e.query():
        if time.time() - t > limit:
            print("HANG", flush=True)
            os._exit(9)
        time.sleep(0.0005)


def times(fn, n=9, sustain=0.25):
    global BIG
    if BIG is None:
        BIG = torch.empty(int(8e9 // 4), dtype=torch.int, device=DEV)
    for _ in range(2):
        fn()
    wait()
    time.sleep(0.3)  # the chip rests, so that variants do not inherit each other's clock
    ts = []
    for _ in range(n):
        BIG.zero_()
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(200000)
        a.record(); fn(); b.record(); wait()
        ts.append(a.elapsed_time(b))
    c = median(ts)
    s = float("nan")
    if sustain:
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        reps = max(10, int(sustain * 1e3 / c))
        for _ in range(reps // 3):
            fn()
        a.record()
        for _ in range(reps):
            fn()
        b.record(); wait()
        s = a.elapsed_time(b) / reps
    return c, s

