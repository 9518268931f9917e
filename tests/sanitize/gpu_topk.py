"""Run every top-k and indexer quantiser kernel on small problems under NVIDIA's compute-sanitizer; results are checked.

python tests/sanitize/gpu_topk.py memcheck     accesses outside of tensors and of shared memory
python tests/sanitize/gpu_topk.py racecheck    hazards between threads in shared memory
python tests/sanitize/gpu_topk.py all
python tests/sanitize/gpu_topk.py problems     the problems alone
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
    from helpers_topk import strange_rows

    from megamoe.kernels.indexer_quantize import indexer_quantize_sources, quantize_indexer, write_indexer_cache
    from megamoe.kernels.jit.kernel import launched_kernels
    from megamoe.kernels.topk import topk_indices, topk_sources

    # rows end where the allocation does; long ones are shared by blocks
    for dtype in (torch.float32, torch.bfloat16):
        for rows, columns in ((25, 6149), (3, 65537)):
            x = strange_rows(columns)[:rows].to(dtype)
            for k in (5, 700):
                expected = topk_indices(x, k, deterministic=True)
                for deterministic in (False, True):
                    found = topk_indices(x.cuda(), k, deterministic=deterministic).cpu()
                    assert torch.equal(found.sort(dim=1).values, expected.sort(dim=1).values), (dtype, rows, k)
    for dtype in (torch.float32, torch.bfloat16):
        for dim in (32, 64, 96, 128):
            x = torch.randn(37, dim).to(dtype)
            for format in ("fp8", "mxfp4"):
                pair = quantize_indexer(x, format), quantize_indexer(x.cuda(), format)
                for expected, found in zip(*pair, strict=True):
                    assert torch.equal(expected.view(torch.uint8), found.cpu().view(torch.uint8))
                cache = torch.zeros(3, 16, 1, pair[0][0].shape[1] + 4, dtype=torch.uint8)
                slots, on_gpu = torch.arange(37).flip(0) + 11, cache.cuda()
                write_indexer_cache(x, cache, slots, format)
                write_indexer_cache(x.cuda(), on_gpu, slots.cuda(), format)
                assert torch.equal(cache, on_gpu.cpu())
    torch.cuda.synchronize()
    missing = {source.name for source in [*topk_sources(), *indexer_quantize_sources()]} - launched_kernels
    assert not missing, f"not launched: {sorted(missing)}"
    print(f"{len(launched_kernels)} kernels launched, results right")


def main(arguments: list[str]) -> int:
    """Run what the command line names; see `run_command`."""
    return run_command(SCRIPT, arguments, problems, __doc__, TOOLS)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
