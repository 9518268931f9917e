"""Loads cubins, encodes tensor maps, packs operands, checks against FP64 maths, times chilled and sustained."""

import ctypes
import time
from statistics import median

import torch
from cuda.bindings import driver as drv

torch.cuda.set_device(0)
torch.zeros(1, device="cuda")
DEV = "cuda"
MAG = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6.0], device=DEV)
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


def feature_of_column(n):
    j, c, b = n // 8, n % 8 // 2, n % 2
    return 32 * (j // 4) + 8 * c + 2 * (j % 4) + b


def pack_words(codes):
    """codes [..., 8] -> uint32 words as int64: magnitudes as selectors, signs woven."""
    w = torch.zeros(codes.shape[:-1], dtype=torch.int64, device=codes.device)
    for i in range(8):
        c = codes[..., i].long()
        w |= (c & 7) << (4 * i)
        w |= (c >> 3) << ((8 * i + 7) if i < 4 else (8 * (i - 4) + 3))
    return torch.where(w >= 2**31, w - 2**32, w).to(torch.int32)


def pack_ss(codes, sc):
    """codes [R, K] 0..15, sc [R, K/32] 0..11 -> [R/128, K/128, 8448] bytes, rows permuted in groups of 32."""
    R, K = codes.shape
    RB, KB = R // 128, K // 128
    idx = torch.tensor([feature_of_column(n) for n in range(128)], device=codes.device)
    c = codes.view(RB, 128, KB, 4, 4, 8)[:, idx].permute(0, 2, 3, 1, 4, 5)  # rb, kb, q, row, word, 8
    w = pack_words(c).contiguous().view(torch.uint8).view(RB, KB, 8192)
    s = sc.view(RB, 128, KB, 4)[:, idx].permute(0, 2, 1, 3).int()
    s16 = s[..., 0] | s[..., 1] << 4 | s[..., 2] << 8 | s[..., 3] << 12
    s16 = torch.where(s16 >= 2**15, s16 - 2**16, s16).to(torch.int16).contiguous().view(torch.uint8).view(RB, KB, 256)
    return torch.cat([w, s16], -1).contiguous()


def pack_rs(codes, sc):
    """codes [R, K], sc [R, K/32] -> [R/64, K/128, 4224] bytes; features 2g, 2g + 1 become rows g, g + 8 of 16."""
    R, K = codes.shape
    RB, KB = R // 64, K // 128
    c = codes.view(RB, 4, 8, 2, KB, 4, 2, 4, 4)  # rb, warp, g, hi, kb, step, half, c4, k4
    c = c.permute(0, 4, 5, 1, 2, 7, 3, 6, 8)  # rb, kb, step, warp, g, c4, hi, half, k4
    w = pack_words(c.reshape(*c.shape[:-2], 8)).view(RB, KB, 2, 2, 128, 2).permute(0, 1, 2, 4, 3, 5)
    w = w.contiguous().view(torch.uint8).view(RB, KB, 4096)
    s = sc.view(RB, 4, 8, 2, KB, 4).permute(0, 4, 1, 2, 3, 5).long()  # rb, kb, warp, g, hi, group
    s16 = s[..., 0] | s[..., 1] << 4 | s[..., 2] << 8 | s[..., 3] << 12
    s16 = torch.where(s16 >= 2**15, s16 - 2**16, s16).to(torch.int16).contiguous().view(torch.uint8).view(RB, KB, 128)
    return torch.cat([w, s16], -1).contiguous()


def unpack_values(codes, sc):
    return (MAG[(codes & 7).long()] * (1 - 2 * (codes >> 3).float())) * torch.exp2(sc.float() - 5).repeat_interleave(32, 1)


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


def chill():
    BIG.zero_()
