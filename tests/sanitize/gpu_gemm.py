"""Run every grouped GEMM and quantiser kernel on small problems under NVIDIA's compute-sanitizer; results are checked.

python tests/sanitize/gpu_gemm.py memcheck     accesses outside of tensors and of shared memory
python tests/sanitize/gpu_gemm.py racecheck    hazards between threads in shared memory
python tests/sanitize/gpu_gemm.py all
python tests/sanitize/gpu_gemm.py problems     the problems alone
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from compute_sanitizer import ROOT, run_command  # noqa: E402

SCRIPT = Path(__file__).resolve()
TOOLS = ("memcheck", "racecheck")


def problems() -> None:
    """Launch every kernel. Operands are made, and results compared, on the CPU: what runs on the GPU is ours."""
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]
    import torch
    from helpers_grouped import GRANULARITIES, KINDS, LIMIT, Weights, activations, check, indices, poison, values

    from megamoe.kernels import formats, gemm
    from megamoe.kernels.gemm_instances import all_sources
    from megamoe.kernels.jit.kernel import launched_kernels
    from megamoe.kernels.packing import PackedWeight
    from megamoe.kernels.quantize import quantize_e4m3, quantize_sources

    def to_gpu(operand: object) -> object:
        if isinstance(operand, PackedWeight):
            operand.data, operand.row_scale = operand.data.cuda(), operand.row_scale.cuda()
            return operand
        return tuple(t.cuda() for t in operand)  # type: ignore[attr-defined]

    counts, n, k, padded = [3, 0, 130, 1], 320, 416, 133
    gemm.set_num_sms(4)
    for kind in KINDS:
        weights = Weights(kind, len(counts), n, k, "cpu")
        rhs = to_gpu(weights.packed)
        groups = indices(counts, 1, "cpu")
        for granularity in GRANULARITIES:
            lhs = activations((len(groups), k), granularity, "cpu")
            out = poison(len(groups), n, device="cpu").cuda()
            weights.contiguous((lhs[0].cuda(), lhs[1].cuda()), rhs, out, groups.cuda())
            check(out.cpu(), values(lhs, granularity), groups, weights.exact, LIMIT, f"{kind} {granularity}")
            lhs = activations((len(counts), padded, k), granularity, "cpu")
            place = torch.arange(padded).expand(len(counts), -1)
            masked_m = torch.tensor(counts, dtype=torch.int32)
            owner = torch.where(place < masked_m[:, None], torch.arange(len(counts))[:, None], -1).flatten()
            for expected in (8, 16, 24, 32, 48, 100, 300):
                out = poison(len(counts), padded, n, device="cpu").cuda()
                weights.masked((lhs[0].cuda(), lhs[1].cuda()), rhs, out, masked_m.cuda(), expected)
                flat = values(lhs, granularity).flatten(0, 1)
                check(out.cpu().flatten(0, 1), flat, owner, weights.exact, LIMIT, f"{kind} {granularity} masked")
    for columns in (320, 4096, 8192, 16384):
        for granularity in GRANULARITIES:
            x = torch.randn(5, columns).bfloat16()
            expected_values, expected_scales = formats.quantize_e4m3(x, granularity)
            q, s = quantize_e4m3(x.cuda(), granularity)
            assert torch.equal(q.cpu().view(torch.uint8), expected_values.view(torch.uint8))
            assert torch.equal(s.cpu(), expected_scales)
    torch.cuda.synchronize()
    missing = {source.name for source in [*all_sources(), *quantize_sources()]} - launched_kernels
    assert not missing, f"not launched: {sorted(missing)}"
    print(f"{len(launched_kernels)} kernels launched, results right")


def main(arguments: list[str]) -> int:
    """Run what the command line names; see `run_command`."""
    return run_command(SCRIPT, arguments, problems, __doc__, TOOLS)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
