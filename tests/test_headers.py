"""The shared headers stand on their own: no include but each other, and NVRTC takes them where it is installed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
INCLUDE = ROOT / "kernels" / "include" / "megamoe"
SHARED = sorted(path for folder in ("common", "layout", "scheduler") for path in (INCLUDE / folder).glob("*.h"))

PROGRAM = """
#include "megamoe/common/codes.h"
#include "megamoe/scheduler/schedule.h"

extern "C" __global__ void tickets(const megamoe::ScheduleShape shape, megamoe::u32* sums, megamoe::u32* phases) {
    using namespace megamoe;
    const Schedule schedule(shape, ScheduleStorage{sums, sums + shape.num_experts, sums + 2 * shape.num_experts + 1});
    const u32 ticket = blockIdx.x * blockDim.x + threadIdx.x;
    if (ticket < schedule.num_tickets()) phases[ticket] = static_cast<u32>(schedule.task(ticket).phase);
}

extern "C" __global__ void codes(float* values, unsigned char* out) {
    using namespace megamoe;
    const float scale = e4m3_scale(values[0]);
    out[0] = e4m3_quantize(values[1], 1.0f / scale);
    out[1] = e2m1_encode(values[1]);
    out[2] = ue8m0_encode(values[1]);
    values[2] = e4m3_decode(out[0]) + e2m1_decode(out[1]) + ue8m0_decode(out[2]);
}

extern "C" __global__ void sizes(const megamoe::WorkspaceLimits limits, const megamoe::LayerShape shape,
                                 const megamoe::TileShape tile, megamoe::u64* out) {
    const megamoe::ControlLayout control(0, limits);
    out[0] = megamoe::DataLayout(control.end, limits, shape, tile).end;
}
"""


@pytest.mark.parametrize("path", SHARED, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_shared_headers_include_only_each_other(path: Path) -> None:
    for name in re.findall(r'#include\s+([<"][^>"]+[>"])', path.read_text()):
        assert re.fullmatch(r'"megamoe/[\w/]+\.h"', name) and (INCLUDE.parent / name.strip('"')).is_file(), name


def test_nvrtc_compiles_them() -> None:
    core = pytest.importorskip("cuda.core", reason="cuda-core (extra cuda13) is not installed")
    try:
        options = core.ProgramOptions(std="c++20", arch="sm_90a", include_path=[str(ROOT / "kernels" / "include")])
        compiled = core.Program(PROGRAM, "c++", options).compile("cubin")
    except (ImportError, RuntimeError) as error:
        if "nvrtc" in str(error).lower() and "error" not in str(error).lower():
            pytest.skip(f"NVRTC is not installed: {error}")
        raise
    assert len(compiled.code) > 1000
