"""Writes include/megamoe/ptx/wgmma.cuh and wgmma_bf16.cuh: a wrapper per WGMMA shape, operands spelled out for PTX."""

from __future__ import annotations

from pathlib import Path

WIDTHS = (8, 16, 24, 32, 40, 48, 64, 80, 96, 112, 128, 192, 256)
PATH = Path(__file__).parent / "include" / "megamoe" / "ptx" / "wgmma.cuh"
# (N, operands of A, whether B is N-major)
BF16_SHAPES = ((64, "ss", False), (256, "rs", True))
BF16_PATH = PATH.with_name("wgmma_bf16.cuh")

HEAD = """// Warpgroup MMA, E4M3 x E4M3 -> FP32, M = 64, K = 32. Written by kernels/codegen_wgmma.py; do not edit.
#pragma once
#include "megamoe/ptx/types.cuh"

namespace megamoe::ptx {

// Orders register accesses of the warpgroup before its next wgmma.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// Closes the group of wgmma issued so far.
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most `kPending` groups are unfinished.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// D[64, N] (+)= A[64, 32] B[N, 32]^T; `ss`: A by descriptor, `rs`: A from registers; accumulate == 0 overwrites D.
template <int N>
struct Wgmma;
"""


BF16_HEAD = """// Warpgroup MMA, BF16 x BF16 -> FP32, M = 64, K = 16. Written by kernels/codegen_wgmma.py; do not edit.
#pragma once
#include "megamoe/ptx/wgmma.cuh"

namespace megamoe::ptx {

// D[64, N] (+)= A[64, 16] B[N, 16]^T; `ss`: A by descriptor, `rs`: A from registers; B of rows along K, or along N
// (kAlongN); accumulate == 0 overwrites D.
template <int N, bool kAlongN>
struct WgmmaBf16;
"""


def _wrapped(items: list[str], indent: str) -> str:
    lines, line = [], indent
    for i, item in enumerate(items):
        piece = item + (", " if i + 1 < len(items) else "")
        if len(line) + len(piece) > 118:
            lines.append(line.rstrip())
            line = indent
        line += piece
    return "\n".join([*lines, line])


def _quoted(text: str, indent: str) -> str:
    words, lines, line = text.split(" "), [], ""
    for word in words:
        if len(indent) + len(line) + len(word) > 110:
            lines.append(line)
            line = ""
        line += word + " "
    return "\n".join(f'{indent}"{part}"' for part in [*lines, line.rstrip() + "\\n"])


def _call(n: int, kind: str, instruction: str = "k32.f32.e4m3.e4m3", flags: str = "p, 1, 1") -> str:
    count = n // 2
    regs = ", ".join(f"%{i}" for i in range(count))
    if kind == "ss":
        sig, a, nxt = "uint64_t a", f"%{count}", count + 1
        inputs = '"l"(a), "l"(b), "r"(accumulate)'
    else:
        sig, nxt = "const uint32_t (&a)[4]", count + 4
        a = "{" + ", ".join(f"%{count + i}" for i in range(4)) + "}"
        inputs = '"r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate)'
    text = f"wgmma.mma_async.sync.aligned.m64n{n}{instruction} {{{regs}}}, {a}, %{nxt}, {flags};"
    outs = _wrapped([f'"+f"(d[{i}])' for i in range(count)], " " * 14)
    head = f"static __device__ __forceinline__ void {kind}(float (&d)[{count}], {sig}, uint64_t b, int accumulate)"
    return f"""    {head} {{
        asm volatile(
            "{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{nxt + 1}, 0;\\n"
{_quoted(text, " " * 12)}
            "}}\\n"
            : {outs.strip()}
            : {inputs});
    }}"""


def _bf16_call(n: int, kind: str, along_n: bool) -> str:
    # ss names the order of A as well; from registers A has only one
    orders = f"0, {int(along_n)}" if kind == "ss" else f"{int(along_n)}"
    return _call(n, kind, "k16.f32.bf16.bf16", f"p, 1, 1, {orders}")


def generate_bf16() -> str:
    """Returns the text of the BF16 header."""
    parts = [BF16_HEAD]
    for n, kind, along_n in BF16_SHAPES:
        struct = f"WgmmaBf16<{n}, {str(along_n).lower()}>"
        parts.append(f"template <>\nstruct {struct} {{\n{_bf16_call(n, kind, along_n)}\n}};\n")
    return "\n".join([*parts, "}  // namespace megamoe::ptx\n"])


def generate() -> str:
    """Returns the text of the header."""
    parts = [HEAD]
    for n in WIDTHS:
        parts.append(f"template <>\nstruct Wgmma<{n}> {{\n{_call(n, 'ss')}\n{_call(n, 'rs')}\n}};\n")
    return "\n".join([*parts, "}  // namespace megamoe::ptx\n"])


if __name__ == "__main__":
    PATH.write_text(generate())
    BF16_PATH.write_text(generate_bf16())
