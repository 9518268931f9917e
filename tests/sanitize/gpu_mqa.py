"""Run MQA logits on small problems under NVIDIA's compute-sanitizer; results are checked.

python tests/sanitize/gpu_mqa.py memcheck     accesses outside of tensors and of shared memory
python tests/sanitize/gpu_mqa.py problems     the problems alone
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from compute_sanitizer import ROOT, run_command  # noqa: E402

SCRIPT = Path(__file__).resolve()
TOOLS = ("memcheck",)


def problems() -> None:
    """Windows, lengths, tables and schedules end where an allocation ends; keys are of no round number."""
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]
    import torch
    from helpers_mqa import POISON, counts_of, dense_problem, oracle, paged_problem, random_windows, windowed

    from megamoe.kernels import mqa_logits

    def exact(values: torch.Tensor | list[int]) -> torch.Tensor:
        """Return int32 values in an allocation that has not a byte more."""
        given = values if isinstance(values, torch.Tensor) else torch.tensor(values, dtype=torch.int32)
        whole = torch.empty(2 << 20, dtype=torch.uint8, device="cuda")  # so large a block is an allocation of its own
        target = whole[len(whole) - given.nbytes :].view(torch.int32).view(given.shape)
        return target.copy_(given)

    def check(out: torch.Tensor, expected: torch.Tensor, what: str) -> None:
        kept = (expected == POISON) | expected.isinf()
        assert torch.equal(out[kept].double(), expected[kept]), what
        error = (out.double() - expected)[~kept].norm() / expected[~kept].norm().clamp(min=1e-30)
        assert float(error) <= 3e-4, (what, float(error))

    runs = 0
    for fp4 in (False, True):
        for heads, head_dim in ((64, 128), (32, 64), (8, 32)):
            for num_keys in (1, 125, 389):
                problem = dense_problem(19, heads, head_dim, num_keys, fp4, "cuda")
                starts, ends = random_windows(19, num_keys)
                logits = oracle(problem.exact_q, problem.exact_keys, problem.weights)
                for columns, clean in ((0, True), (0, False), (50, True)):
                    out = torch.full((19, columns or num_keys), POISON, device="cuda")
                    problem.call(problem.weights, exact(starts), exact(ends), clean, columns, out=out)
                    expected = windowed(logits, starts, ends, out.shape[1], columns > 0, clean)
                    check(out, expected, f"{fp4=} {heads=} {head_dim=} {num_keys=} {columns=}")
                    runs += 1
        for page in (16, 64, 256):
            for next_n in (1, 2, 3):
                for lengths in ([1, 63, 64, 65, 300, 0], [0] * 32):
                    paged = paged_problem(lengths, next_n, 64, 128, page, fp4, "cuda")
                    q, cache, weights, table = paged.arguments
                    given = exact(torch.tensor(lengths, dtype=torch.int32))
                    schedule = exact(mqa_logits.get_paged_mqa_logits_metadata(given, page, 5))
                    function = mqa_logits.fp8_fp4_paged_mqa_logits if fp4 else mqa_logits.fp8_paged_mqa_logits
                    out = torch.full((len(lengths) * next_n, 310), POISON, device="cuda")
                    function(q, cache, weights, given, exact(table), schedule, 310, True, out=out)
                    expected = paged.expected(counts_of(lengths, next_n), 310, True)
                    check(out, expected, f"{fp4=} {page=} {next_n=}")
                    runs += 1
    torch.cuda.synchronize()
    print(f"{runs} calls, results right")


def main(arguments: list[str]) -> int:
    """Run what the command line names; see `run_command`."""
    return run_command(SCRIPT, arguments, problems, __doc__, TOOLS)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
