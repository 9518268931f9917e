"""Run the sparse attention kernel on small problems under NVIDIA's compute-sanitizer; results are checked.

python tests/sanitize/gpu_attention.py memcheck     accesses outside of tensors and of shared memory
python tests/sanitize/gpu_attention.py problems     the problems alone
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from compute_sanitizer import ROOT, run_command  # noqa: E402

SCRIPT = Path(__file__).resolve()
TOOLS = ("memcheck",)


def problems() -> None:
    """Rows, queries, lists and sinks are allocations of their own; lists have holes, and name the last row."""
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]
    import torch
    from test_sparse_attention import dense

    from megamoe.kernels.jit.kernel import launched_kernels
    from megamoe.kernels.sparse_attention import RowCut, sparse_attention
    from megamoe.kernels.sparse_attention_sm90 import sparse_attention_sources

    torch.manual_seed(0)
    for width, heads in ((576, 128), (512, 64)):
        for count in (1, 64, 65, 197):
            cut, num_rows = RowCut((0, width), (0, 512)), count + 3
            q = torch.randn(3, heads, width).bfloat16()
            rows = torch.randn(num_rows, 1, width).bfloat16()
            index = torch.stack([torch.randperm(num_rows)[:count] for _ in range(3)]).int()
            index[0, 0], index[1, count // 2 :], index[2, ::3] = num_rows - 1, -1, -1
            for sinks in (None, torch.randn(heads)):
                on_gpu = [t.cuda() for t in (q, rows, index)]
                found = sparse_attention(*on_gpu, cut, scale=0.04, sinks=None if sinks is None else sinks.cuda())[0]
                exact = dense(q.double(), rows.double(), index, cut, 0.04, None if sinks is None else sinks.double())
                error = (found.cpu().double() - exact).norm() / exact.norm().clamp(min=1e-30)
                assert float(error) <= 6e-3, (width, heads, count, float(error))
    missing = {source.name for source in sparse_attention_sources()} - launched_kernels
    assert not missing, f"not launched: {sorted(missing)}"
    print(f"{len(launched_kernels)} kernels launched, results right")


def main(arguments: list[str]) -> int:
    """Run what the command line names; see `run_command`."""
    return run_command(SCRIPT, arguments, problems, __doc__, TOOLS)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
