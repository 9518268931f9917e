"""Run the kernels around the mega-kernel on small problems under NVIDIA's compute-sanitizer; results are checked.

These are the router's logits and routing, and the activation of shared experts.

python tests/sanitize/gpu_router.py memcheck     accesses outside of tensors and of shared memory
python tests/sanitize/gpu_router.py racecheck    hazards between threads in shared memory
python tests/sanitize/gpu_router.py synccheck    barriers that not all threads reach, or in a wrong state
python tests/sanitize/gpu_router.py all
python tests/sanitize/gpu_router.py problems     the problems alone
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from compute_sanitizer import ROOT, run_command  # noqa: E402

SCRIPT = Path(__file__).resolve()
TOOLS = ("memcheck", "racecheck", "synccheck")


def problems() -> None:
    """Launch every kernel. Operands are made, and results compared, on the CPU: what runs on the GPU is ours."""
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]
    import torch
    from helpers_routing import MENU, check_against_reference, check_ids, hash_router, make
    from test_gated_rows import FORMULAS
    from test_router_gpu import exact_logits

    from megamoe.kernels import routing
    from megamoe.kernels.activation import activate
    from megamoe.kernels.gated import gated_rows, gated_rows_source, takes_rows
    from megamoe.kernels.jit.kernel import launched_kernels
    from megamoe.kernels.route import route
    from megamoe.kernels.router_logits import router_logits, router_logits_sources, takes_logits
    from megamoe.layers.router import RouterOutput

    torch.manual_seed(0)
    expected_kernels = {gated_rows_source(formula[0]).name for formula in FORMULAS}

    # rows of hidden, experts and tokens that end in the middle of what a warp, a cluster or a tile takes
    for dtype in (torch.float32, torch.bfloat16):
        for experts, hidden in ((33, 520), (8, 2056), (40, 4104), (17, 6152)):
            expected_kernels |= {source.name for source in router_logits_sources(hidden, dtype)}
            weight, bias = (torch.randn(experts, hidden) * hidden**-0.5).to(dtype), torch.randn(experts).to(dtype)
            for count in (1, 7, 8, 9, 45):
                x = torch.randn(count, hidden).bfloat16()
                for extra in (None, bias):
                    given = x.cuda(), weight.cuda(), None if extra is None else extra.cuda()
                    assert takes_logits(*given)
                    exact, size = exact_logits(x, weight, extra)
                    error = (router_logits(*given).cpu() - exact).abs() / size
                    assert float(error.max()) <= 8 * 2.0**-24, (dtype, experts, hidden, count)

    for name in MENU:
        for correction in (False, True):
            router = make(name, logit_bias=False, bias=correction)
            expected_kernels.add(router._shape.name)
            bias = router.e_score_correction_bias
            for count in (1, 25):
                z = torch.randn(count, router.num_experts)
                load = torch.zeros(router.num_experts, dtype=torch.int64).cuda()
                on_gpu = None if bias is None else bias.cuda()
                ids, weights = (t.cpu() for t in route(router._shape, z.cuda(), on_gpu, router.config.scale, load))
                check_ids(ids, router.num_experts)
                assert torch.equal(load.cpu(), torch.bincount(ids.flatten(), minlength=router.num_experts))
                if count > 1:
                    check_against_reference(router, RouterOutput(ids, weights, z, None))
    for score in ("softmax", "sigmoid", "sqrtsoftplus"):
        for renormalize in (False, True):
            router = hash_router(score=score, renormalize=renormalize)
            expected_kernels.add(router._shape.name)
            table = router.tid2eid
            assert table is not None
            table[5] = torch.tensor([3, -1, 8, -1, -1, 9])
            for dtype in (torch.int32, torch.int64):
                tokens = torch.tensor([5, -1, 6, 99, 5, -7, 0], dtype=dtype)
                z = torch.randn(7, router.num_experts)
                load = torch.zeros(router.num_experts, dtype=torch.int64).cuda()
                given = {"table": table.cuda(), "input_ids": tokens.cuda()}
                found = route(router._shape, z.cuda(), None, router.config.scale, load, **given)
                ids = routing.lookup_experts(table, tokens)
                assert torch.equal(found[0].cpu(), ids)
                options = {"score": score, "renormalize": renormalize, "scale": router.config.scale}
                exact = routing.routing_weights(z, ids, **options)
                assert torch.allclose(found[1].cpu(), exact, rtol=1e-6, atol=0)

    for activation, limit, alpha in FORMULAS:
        for shape in ((1, 16), (3, 4096), (130, 96)):
            x = (torch.randn(shape) * 6).bfloat16()
            assert takes_rows(x.cuda())
            found = gated_rows(x.cuda(), activation=activation, limit=limit, alpha=alpha).cpu().double()
            gate, up = x.chunk(2, dim=-1)
            exact = activate(gate, up, activation=activation, limit=limit, alpha=alpha).double()
            assert torch.allclose(found, exact, rtol=2.0**-8, atol=1e-30), (activation, shape)  # one rounding to BF16
    torch.cuda.synchronize()
    missing = expected_kernels - launched_kernels
    assert not missing, f"not launched: {sorted(missing)}"
    print(f"{len(expected_kernels)} kernels launched, results right")


def main(arguments: list[str]) -> int:
    """Run what the command line names; see `run_command`."""
    return run_command(SCRIPT, arguments, problems, __doc__, TOOLS)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
