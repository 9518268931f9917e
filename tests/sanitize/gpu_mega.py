"""Run every instance of the mega-kernel on small problems under NVIDIA's compute-sanitizer; results are checked.

python tests/sanitize/gpu_mega.py             every tool below that is expected to find nothing
python tests/sanitize/gpu_mega.py memcheck    accesses outside of tensors and of shared memory
python tests/sanitize/gpu_mega.py synccheck   barriers that not all threads reach, or in a wrong state
python tests/sanitize/gpu_mega.py racecheck   shared memory; it does not follow mbarriers (tests/test_sanitize_gpu.py)
python tests/sanitize/gpu_mega.py problems    the problems alone
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from compute_sanitizer import ROOT, run_command  # noqa: E402

SCRIPT = Path(__file__).resolve()
SILENT = ("memcheck", "synccheck")


def problems() -> None:
    """Launch every instance on few CTAs, with rows and columns that end in the middle of a block."""
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]
    import torch
    from helpers_mega import gpu_problem, gpu_tokens, launch
    from helpers_moe import check

    from megamoe.comm.collectives import Collectives
    from megamoe.comm.groups import resolve_group
    from megamoe.config import MoESpec
    from megamoe.device_workspace import DeviceWorkspace
    from megamoe.functional import MoEContext
    from megamoe.kernels.mega_moe import ACT_SCALES, INSTANCES

    device = torch.device("cuda", torch.cuda.current_device())
    small: dict[str, Any] = dict(hidden=320, intermediate=160, num_experts=4, top_k=2)
    crowded: dict[str, Any] = dict(hidden=160, intermediate=96, num_experts=16, top_k=16)
    many: dict[str, Any] = dict(hidden=320, intermediate=160, num_experts=32, top_k=8)
    cases = [(small, act_scale, (0, 1, 48, 70), 48) for act_scale in ACT_SCALES]  # the last count in two chunks
    cases.append((crowded, "block128", (257,), 257))  # more choices than one publish task sorts
    cases.append((many, "token", (48,), 48))  # 32 units of 4 panels of weights: more than are kept
    for sizes, act_scale, counts, bound in cases:
        spec = MoESpec(**sizes, weight_format="mxfp4", act_scale=act_scale, expert_bias=True)
        collectives = Collectives(resolve_group(None), device, 100.0)
        workspace = DeviceWorkspace([spec], collectives, max_tokens_per_rank=bound, num_sms=4)
        own = MoEContext(spec, None, "sm90", device=device, max_tokens_per_rank=bound, workspace=workspace)
        problem = gpu_problem(spec)
        for count in counts:
            tokens = gpu_tokens(spec, count)
            tokens[1][::3, 1] = -1
            received = torch.zeros(spec.num_experts, dtype=torch.int32, device=device)
            for instance in INSTANCES:
                y = launch(own, tokens, problem.weights, instance, received)
                torch.cuda.synchronize()
                workspace.check()
                check(problem, y, *tokens)
    print("all instances ran, results right")


def main(arguments: list[str]) -> int:
    """Run what the command line names; see `run_command`."""
    return run_command(SCRIPT, arguments, problems, __doc__, SILENT, ("racecheck",))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
