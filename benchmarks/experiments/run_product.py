"""Product kernels: correctness on ragged problems (poisoned outputs), same bits across tiles and mainloops, timings."""

import os
import struct
import sys

import torch
from common import DEV, Kernel, tensor_map, times, wait
from megamoe.kernels.packing_sm90 import pack_mxfp4

MAG = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6.0], device=DEV, dtype=torch.float64)
SMS = 132
CUBINS = os.environ.get("CUBINS", ".")  # where build_product.sh put them
KINDS = {  # kind -> (tile rows, tile features, fp4, threads, smem without the group table)
    "t4": (256, 128, 1, 512), "w4": (128, 256, 1, 512), "t8": (256, 128, 0, 384), "w8": (128, 256, 0, 384),
    **{f"r{t}": (t, 256, 1, 640) for t in (8, 16, 24, 32, 48)},
}


def smem_bytes(kind, token):
    tm, tn, fp4, _ = KINDS[kind]
    if kind[0] == "r":
        stages = 4 if tm == 48 else 5
        scale = 0 if token else (tm + 35) // 32 * 128
        return stages * ((2 * (tm * 128 + 4 * 4224 + scale) + 1023) // 1024 * 1024 + 16)
    return 4 * ((tm + tn) * 128 + (0 if token else (tm + 35) // 32 * 128) + 16) + (8 * tn * 4 if fp4 else 0)


class Problem:
    def __init__(s, rows, n, k, *, masked=0, positive=False, fp4=True, fp8=True, gap=0):
        """rows: per group; masked: rows of the padded layout; gap: padding rows after each group (contiguous)."""
        torch.manual_seed(1)
        s.rows, s.n, s.k, s.G, s.masked = rows, n, k, len(rows), masked
        s.kb = (k + 127) // 128
        s.first = [g * masked for g in range(s.G)] if masked else [sum(rows[:g]) + g * gap for g in range(s.G)]
        s.M = s.G * masked if masked else sum(rows) + gap * s.G
        f = (lambda *a: torch.rand(*a, device=DEV) + 0.1) if positive else (lambda *a: torch.randn(*a, device=DEV))
        s.x = f(max(s.M, 1), k).to(torch.float8_e4m3fn)
        m4 = (max(s.M, 1) + 3) // 4 * 4
        s.sx = torch.rand(s.kb, m4, device=DEV) + 0.5
        s.st = torch.rand(max(s.M, 1), device=DEV) + 0.5
        s.starts = torch.tensor(s.first, dtype=torch.int32, device=DEV)
        s.ends = s.starts + torch.tensor(rows, dtype=torch.int32, device=DEV)
        s.counts = torch.tensor(rows, dtype=torch.int32, device=DEV)
        if fp4:
            s.codes = torch.randint(0, 256, (s.G, n, k // 2), dtype=torch.uint8, device=DEV)
            if positive:
                s.codes &= 0x77
            s.scales = torch.randint(117, 129, (s.G, n, k // 32), dtype=torch.uint8, device=DEV)
            s.ss, s.rs = pack_mxfp4(s.codes, s.scales, "sm90_ss"), pack_mxfp4(s.codes, s.scales, "sm90_rs")
            assert s.ss.num_inexact == 0
        if fp8:
            s.w8 = f(s.G * n, k).to(torch.float8_e4m3fn)
            s.w8s = torch.rand(s.G, (n + 127) // 128, s.kb, device=DEV) + 0.5

    def launch(s, kind, token, grid=SMS):
        tm, tn, fp4, threads = KINDS[kind]
        k = Kernel(f"{CUBINS}/{kind}_{token}.cubin", smem=smem_bytes(kind, token) + 4 * (3 * s.G + 1))
        box = tm
        xm = tensor_map(s.x, (s.k, s.x.shape[0]), (s.k,), (128, box))
        wm = bytes(128) if fp4 else tensor_map(s.w8, (s.k, 2, 4, 4, s.G * s.n // 32), (s.k, 8 * s.k, 2 * s.k, 32 * s.k), (128, 2, 4, 4, tn // 32))
        pk = (s.rs if kind[0] == "r" else s.ss) if fp4 else None
        d = torch.full((max(s.M, 1), s.n), float("nan"), device=DEV, dtype=torch.bfloat16)
        blob = xm + wm + struct.pack(
            "<4Q2q2Q4i", pk.blocks.data_ptr() if fp4 else 0, (pk.row_scales if fp4 else s.w8s).data_ptr(), (s.st if token else s.sx).data_ptr(), d.data_ptr(), s.n, s.sx.shape[1],
            0 if s.masked else s.starts.data_ptr(), (s.counts if s.masked else s.ends).data_ptr(), s.G, s.masked or 2**30, s.n, s.kb)
        go = k.bind(blob + bytes(-len(blob) % 64), grid, threads)
        go.all = (k, pk)
        return go, d

    def error(s, d, fp4, token, groups=None, sample=0):
        num = den = 0.0
        worst = 0.0
        touched = torch.zeros(max(s.M, 1), dtype=torch.bool, device=DEV)
        for g in range(s.G):
            touched[s.first[g] : s.first[g] + s.rows[g]] = True
        for g in groups if groups is not None else range(s.G):
            if s.rows[g] == 0:
                continue
            r = torch.arange(s.rows[g], device=DEV) if not sample else torch.randperm(s.rows[g], device=DEV)[:sample]
            r = r + s.first[g]
            x = s.x[r].double()
            sc = s.st[r][:, None] if token else s.sx[:, r].t().repeat_interleave(128, 1)[:, : s.k]
            x = x * sc.double()
            if fp4:
                c = torch.stack([s.codes[g] & 15, s.codes[g] >> 4], -1).flatten(-2).long()
                w = MAG[c & 7] * (1 - 2 * (c >> 3).double()) * torch.exp2(s.scales[g].double() - 127).repeat_interleave(32, 1)
            else:
                w = s.w8[g * s.n : (g + 1) * s.n].double() * s.w8s[g].double().repeat_interleave(128, 0)[: s.n].repeat_interleave(128, 1)[:, : s.k]
            ref, o = x @ w.t(), d[r].double()
            num += float(((o - ref) ** 2).sum()); den += float((ref**2).sum())
            worst = max(worst, float(((o - ref).norm(dim=1) / ref.norm(dim=1)).max()))
        clean = bool(d[~touched].isnan().all()) and not bool(d[touched].isnan().any())
        return (num / max(den, 1e-300)) ** 0.5, worst, clean


def correctness():
    g = torch.Generator().manual_seed(0)
    multi = torch.bincount(torch.randint(0, 8, (1500,), generator=g), minlength=8).tolist()
    cases = {
        "M0": dict(rows=[0, 0], n=128, k=128), "one": dict(rows=[1], n=128, k=128), "k32": dict(rows=[7, 0, 3], n=320, k=320, gap=2),
        "empty": dict(rows=[0, 129, 0, 1, 127, 0], n=320, k=2880), "2880": dict(rows=[64, 300], n=2880, k=2880), "multi": dict(rows=multi, n=512, k=4096, gap=5),
        "onehot": dict(rows=[0, 0, 1000, 0], n=4096, k=512), "pos": dict(rows=[100, 257], n=512, k=7168, positive=True),
        "masked": dict(rows=[0, 24, 1, 48, 130], n=896, k=1024, masked=200), "k128": dict(rows=[40, 200, 7], n=384, k=96),
    }
    for name, c in cases.items():
        p = Problem(c.pop("rows"), c.pop("n"), c.pop("k"), **c)
        for token in (0, 1):
            outs = {}
            line = f"{name:7s} {'token' if token else 'block'}"
            for kind in KINDS:
                fp4 = KINDS[kind][2]
                for grid in (SMS, 3):
                    go, d = p.launch(kind, token, grid)
                    go(); wait()
                    e, w, clean = p.error(d, fp4, token)
                    limit = 4e-3 if "pos" in name else 2.5e-3
                    good = clean and e <= limit and w <= 4 * limit
                    same = torch.equal(outs.setdefault(fp4, d).view(torch.int16), d.view(torch.int16))
                    if not good or not same:
                        line += f" | {kind}/{grid} err {e:.5f}/{w:.5f} clean {clean} same {same} BAD"
                line += f" {kind}:{e:.5f}"
            print(line, flush=True)


def timing():
    def case(name, p, kinds, tokens, by):
        for kind in kinds:
            for token in tokens:
                go, d = p.launch(kind, token)
                c, s = times(go)
                e, w, clean = p.error(d, KINDS[kind][2], token, groups=[p.G - 1], sample=128)
                fl = 2 * sum(p.rows) * p.n * p.k
                bytes_ = p.ss.blocks.numel() if KINDS[kind][2] else p.w8.numel()
                print(f"{name} {kind} {'token' if token else 'block128'}: chilled {c*1e3:.1f}us {fl/c/1e9:.0f} TFLOPS {bytes_/c/1e6:.0f} GB/s sustained {s*1e3:.1f}us {fl/s/1e9:.0f} err {e:.5f}/{w:.5f} {clean}", flush=True)
    g = torch.Generator().manual_seed(0)
    a = torch.randn(8192, 8192, device=DEV).to(torch.float8_e4m3fn); one = torch.ones(1, device=DEV)
    c, s = times(lambda: torch._scaled_mm(a, a.t(), one, one, out_dtype=torch.bfloat16))
    print(f"cuBLASLt fp8 8192^3 chilled {2*8192**3/c/1e9:.0f} sustained {2*8192**3/s/1e9:.0f}", flush=True)
    case("32x1536 n4096 k4096", Problem([1536] * 32, 4096, 4096), ("t4", "w8"), (0, 1), 0)
    case("32x1536 n4096 k2048", Problem([1536] * 32, 4096, 2048), ("t4", "w8"), (0, 1), 0)
    multi = torch.bincount(torch.randint(0, 32, (49152,), generator=g), minlength=32).tolist()
    case("multinomial 49152 n4096 k4096", Problem(multi, 4096, 4096), ("t4", "w8"), (0, 1), 0)
    case("4x8192 n4096 k7168", Problem([8192] * 4, 4096, 7168, fp4=False), ("w8",), (0,), 0)
    case("dense 8192^3", Problem([8192], 8192, 8192), ("t4", "w8"), (0,), 0)
    case("masked 32x24 n4096 k4096", Problem([24] * 32, 4096, 4096, masked=64), ("r24", "w8"), (0, 1), 0)
    case("masked 8x48 n4096 k7168", Problem([48] * 8, 4096, 7168, masked=64), ("r48", "w8"), (0, 1), 0)


if __name__ == "__main__":
    if "c" in sys.argv[1]:
        correctness()
    if "t" in sys.argv[1]:
        timing()
