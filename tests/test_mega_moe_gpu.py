"""The mega-kernel on one GPU: the oracle's answer, the same bits by every way, graphs, streams, weights that change."""

from __future__ import annotations

import ctypes
import dataclasses
import gc
from functools import lru_cache
from typing import Any

import pytest
import torch
from helpers_mega import gpu_problem, gpu_tokens, launch, same_bits
from helpers_moe import Problem, check, expected, local_weights
from torch import Tensor

import megamoe
import megamoe.kernels.mega_moe as mega_moe_kernel
from megamoe.comm.collectives import Collectives
from megamoe.comm.groups import resolve_group
from megamoe.config import MoEConfig, MoESpec
from megamoe.device_workspace import DeviceWorkspace
from megamoe.errors import MegaMoeError
from megamoe.functional import MoEContext, mega_moe
from megamoe.kernels.cpu_engine import load as load_host
from megamoe.kernels.formats import quantize_e4m3
from megamoe.kernels.jit import KernelSource, load
from megamoe.kernels.mega_moe import INSTANCES, layer_shape, select_instance
from megamoe.layers.moe import MoELayer
from megamoe.testing.numeric import compare

pytestmark = pytest.mark.gpu

SCALES = ("token", "block128")
COUNTS = (0, 1, 7, 40, 300, 1000)
FORMAT: dict[str, Any] = {"weight_format": "mxfp4", "act_scale": "token"}


def spec_of(hidden: int, intermediate: int, num_experts: int, top_k: int, **options: Any) -> MoESpec:
    return MoESpec(
        hidden=hidden, intermediate=intermediate, num_experts=num_experts, top_k=top_k, **{**FORMAT, **options}
    )


SMALL = spec_of(512, 256, 8, 2)
SHAPES = {
    "small": SMALL,
    # rows and columns that end in the middle of a block of 128
    "gpt-oss": spec_of(2880, 2880, 8, 4, activation="swiglu_oai", swiglu_limit=7.0, expert_bias=True),
    "flash": spec_of(4096, 2048, 8, 6, activation="swiglu_clamp", swiglu_limit=10.0),
    "narrow": spec_of(2048, 320, 16, 8),
    "wide": spec_of(8192, 2048, 4, 2),
    "short": spec_of(3072, 1536, 4, 2),
}


@lru_cache(maxsize=1)
def problem_of(spec: MoESpec) -> Problem:
    return gpu_problem(spec)


def context(spec: MoESpec, bound: int = 1024, num_sms: int | None = None, **options: Any) -> MoEContext:
    device = torch.device("cuda", torch.cuda.current_device())
    if num_sms is not None:
        collectives = Collectives(resolve_group(None), device, 60.0)
        options["workspace"] = DeviceWorkspace([spec], collectives, max_tokens_per_rank=bound, num_sms=num_sms)
    return MoEContext(spec, None, "sm90", device=device, max_tokens_per_rank=bound, **options)


def settle(own: MoEContext) -> None:
    """Wait for the GPU, and raise what any call so far has met."""
    torch.cuda.synchronize()
    own.backend.workspace.check()  # type: ignore[attr-defined]


# ---- the answer -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("act_scale", SCALES)
@pytest.mark.parametrize("name", SHAPES)
def test_the_oracle_and_every_instance(name: str, act_scale: str) -> None:
    """Case C14. Every count by every instance: the same bits, and the oracle's answer."""
    spec = dataclasses.replace(SHAPES[name], act_scale=act_scale)
    problem, own = problem_of(spec), context(spec)
    for count in COUNTS:
        tokens = gpu_tokens(spec, count, seed=count)
        results = [launch(own, tokens, problem.weights, instance) for instance in INSTANCES]
        settle(own)
        assert same_bits(*results), f"{count} tokens: the instances differ"
        check(problem, results[0], *tokens)


@pytest.mark.parametrize("act_scale", SCALES)
@pytest.mark.parametrize("position", ["after", "before"])
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize(
    "activation",
    [
        {"activation": "silu"},
        {"activation": "swiglu_clamp"},
        {"activation": "swiglu_clamp", "swiglu_limit": 1.0},
        {"activation": "swiglu_oai", "swiglu_limit": 1.5},
    ],
    ids=["silu", "unclamped", "clamp", "oai"],
)
def test_every_option_of_the_op(activation: dict[str, Any], bias: bool, position: str, act_scale: str) -> None:
    spec = spec_of(512, 256, 8, 2, expert_bias=bias, weight_position=position, act_scale=act_scale, **activation)
    problem, own = gpu_problem(spec), context(spec)
    tokens = gpu_tokens(spec, 130)
    results = [launch(own, tokens, problem.weights, instance) for instance in INSTANCES]
    settle(own)
    assert same_bits(*results)
    check(problem, results[0], *tokens)


def intermediate_of(own: MoEContext, experts: Any, tokens: Any, instance: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return what the last call, of one chunk and few rows, left in ring 2: h `[rows, I]`, its slots, its experts."""
    spec, workspace, (_, ids, _) = own.spec, own.backend.workspace, tokens  # type: ignore[attr-defined]
    plan = own.backend._ready(experts).plan  # type: ignore[attr-defined]
    tile = tuple(plan.prepared(len(ids), INSTANCES[instance]).args.tile)
    numbers = load_host().layout_from_numbers(workspace.limits, layer_shape(spec), tile)
    block_rows, unit_blocks, ring1, ring2 = tile[0], tile[1], tile[9], tile[10]
    columns, unit_rows = -(-spec.intermediate // 128) * 128, numbers["unit_rows"]
    memory, rows_of_ring = workspace.tensor, ring2 * unit_rows

    def region(first: int, count: int, dtype: torch.dtype) -> Tensor:
        return memory[first : first + count * dtype.itemsize].view(dtype)

    values = region(numbers["ring2"], rows_of_ring * columns, torch.float8_e4m3fn).view(rows_of_ring, columns)
    scales = region(numbers["ring2"] + rows_of_ring * columns, rows_of_ring * columns // 128, torch.float32)
    after = numbers["ring2"] + -(-rows_of_ring * layer_shape(spec)[7] // 64) * 64  # the next region of DataLayout
    meta = region(after, 4 * (ring1 + ring2) * unit_rows, torch.int32).view(-1, 4)
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    unit = 0
    for expert, rows in enumerate(torch.bincount(ids.flatten(), minlength=spec.num_experts).tolist()):
        for first in range(0, rows, block_rows * unit_blocks):
            assert unit < ring2, "more units than the ring holds"
            for begin in range(first, min(rows, first + block_rows * unit_blocks), block_rows):
                count, at = min(block_rows, rows - begin), unit * unit_rows + begin - first
                block = scales[at * columns // 128 :][: block_rows * columns // 128].view(-1, block_rows)[:, :count]
                h = values[at : at + count].float() * block.t().repeat_interleave(128, dim=1)
                slots = meta[at : at + count, 1].long()
                found.append((h[:, : spec.intermediate], slots, torch.full_like(slots, expert)))
            unit += 1
    h, slots, owners = (torch.cat(parts) for parts in zip(*found, strict=True))
    return h, slots, owners


@pytest.mark.parametrize("act_scale", SCALES)
def test_all_positive(act_scale: str) -> None:
    """Case C23: nothing cancels, so the sums' own error shows; without promotion it would be 0.1.

    The second linear is held against FP64 sums of the h that the kernel itself has quantised, as well.
    """
    spec = spec_of(7168, 512, 4, 2, act_scale=act_scale)
    problem, own = gpu_problem(spec, positive=True), context(spec)
    x, ids, weights = gpu_tokens(spec, 200)
    tokens = (x.abs(), ids, weights)
    truth = expected(problem, *tokens).double()
    w2 = problem.weights.dequantize(torch.float64)[1]
    for instance in INSTANCES:
        y = launch(own, tokens, problem.weights, instance)
        settle(own)
        error = float((y.double() - truth).norm() / truth.norm())
        h, slots, owners = intermediate_of(own, problem.weights, tokens, instance)
        assert sorted(slots.tolist()) == list(range(ids.numel())) and torch.equal(ids.flatten()[slots], owners)
        results = torch.zeros(ids.numel(), spec.hidden, dtype=torch.float64, device="cuda")
        for expert in range(spec.num_experts):
            own_rows = owners == expert
            results[slots[own_rows]] = h[own_rows].double() @ w2[expert].t()
        results = (results * weights.flatten()[:, None]).to(torch.bfloat16).double()
        from_h = results.view(*ids.shape, -1).sum(1)
        own_error = float((y.double() - from_h).norm() / from_h.norm())
        print(f"{instance}: relative L2 {error:.2e}, from the kernel's own h {own_error:.2e}")
        assert error <= 4e-3 and own_error <= 4e-3


def test_ids() -> None:
    """Case C3 on one rank: no expert, with weights that are NaN; duplicates; both types; ids above the last expert."""
    spec = spec_of(1024, 384, 128, 8)
    problem, own = problem_of(spec), context(spec)
    x, ids, weights = gpu_tokens(spec, 257)
    generator = torch.Generator().manual_seed(7)
    ids[(torch.rand(ids.shape, generator=generator) < 0.3).cuda()] = -1
    ids[::10] = -1
    ids[5] = torch.tensor([5, 5, 5, 5, 9, 9, -1, 0])
    weights[ids == -1] = float("nan")
    for instance in INSTANCES:
        y = launch(own, (x, ids, weights), problem.weights, instance)
        settle(own)
        assert not bool(y[::10].any()), "a token without experts is zero"
        check(problem, y, x, ids, weights)
        assert same_bits(y, launch(own, (x, ids.int(), weights), problem.weights, instance))
        beyond = ids.clone()
        beyond[beyond == -1] = spec.num_experts
        assert same_bits(y, launch(own, (x, beyond, weights), problem.weights, instance)), "E is no expert"
    strict = context(spec, check=True)
    with pytest.raises(MegaMoeError, match="topk_ids: rank 0 has .* ids above the last expert; valid are 0 to 127"):
        mega_moe(x, beyond, weights, problem.weights, strict)
    assert same_bits(mega_moe(x, ids, weights, problem.weights, strict), y)


def test_rows_that_an_expert_got_are_added_up() -> None:
    problem, own = problem_of(SMALL), context(SMALL)
    received = torch.zeros(8, dtype=torch.int32, device="cuda")
    wanted = torch.zeros(8, dtype=torch.int64, device="cuda")
    for count, instance in ((300, "prefill"), (7, "decode"), (0, "decode"), (33, "expanded")):
        tokens = gpu_tokens(SMALL, count, seed=count)
        tokens[1][: count // 3] = 5
        launch(own, tokens, problem.weights, instance, received)
        wanted += torch.bincount(tokens[1].flatten(), minlength=8)
    assert torch.equal(received.long(), wanted)


def test_other_dtypes_of_x_and_chunks() -> None:
    """x is rounded to BF16; more tokens than the bound run in chunks (case C4); `out` is written to."""
    problem, own = problem_of(SMALL), context(SMALL, bound=64)
    x, ids, weights = gpu_tokens(SMALL, 131)
    whole = launch(context(SMALL), (x, ids, weights), problem.weights)
    out = torch.full_like(x, float("nan"))
    assert same_bits(mega_moe(x, ids, weights, problem.weights, own, out=out), whole) and same_bits(out, whole)
    for dtype in (torch.float32, torch.float16):
        y = mega_moe(x.to(dtype), ids, weights, problem.weights, own)
        assert y.dtype == dtype and compare(y, whole.to(dtype), "quantised").ok
    wide = torch.empty(131, 2 * SMALL.hidden, dtype=torch.bfloat16, device="cuda")
    wide[:, ::2] = x
    assert same_bits(mega_moe(wide[:, ::2], ids, weights, problem.weights, own), whole)


@pytest.mark.parametrize("act_scale", SCALES)
@pytest.mark.parametrize("num_sms", [1, 3, 131, None])
def test_chunks_with_any_number_of_ctas(num_sms: int | None, act_scale: str) -> None:
    """Case C4: a call of up to nine chunks gives the bits of one; statistics add up; a graph replays them."""
    spec = spec_of(512, 256, 8, 2, act_scale=act_scale)
    problem, whole = problem_of(spec), context(spec)
    few = context(spec, bound=40, num_sms=num_sms)
    received = torch.zeros(8, dtype=torch.int32, device="cuda")
    wanted = torch.zeros(8, dtype=torch.int64, device="cuda")
    for count in (41, 0, 80, 333, 40, 1, 121):
        tokens = gpu_tokens(spec, count, seed=count)
        tokens[1][: count // 3] = 5
        tokens[1][count // 2 :: 7] = -1
        for instance in INSTANCES:
            y = launch(few, tokens, problem.weights, instance, received)
            wanted += torch.bincount(tokens[1][tokens[1] >= 0], minlength=8)
            assert same_bits(y, launch(whole, tokens, problem.weights, instance)), (count, instance)
    settle(few)
    assert torch.equal(received.long(), wanted)
    tokens = gpu_tokens(spec, 130)
    mega_moe(*tokens, problem.weights, few)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = mega_moe(*tokens, problem.weights, few)
    for seed in range(3):
        for target, source in zip(tokens, gpu_tokens(spec, 130, seed=seed), strict=True):
            target.copy_(source)
        graph.replay()
        assert same_bits(y.clone(), launch(whole, tokens, problem.weights))
    settle(few)


@pytest.mark.parametrize("act_scale", SCALES)
def test_more_panels_than_are_kept(act_scale: str) -> None:
    """Every expert gets every token: two units an expert, whose panels take the memory in turn; as one call, as chunks.

    Hidden ends in the middle of a K step, and of the columns of a panel.
    """
    spec = spec_of(2880, 1024, 4, 4, act_scale=act_scale, expert_bias=True)
    problem, own, few = problem_of(spec), context(spec, bound=2500), context(spec, bound=900)
    tokens = gpu_tokens(spec, 2500)
    assert 4 * 2 * (8 + 12) > mega_moe_kernel._PANEL_SLOTS
    for bound in (2500, 900):
        assert select_instance(spec, bound, 1).name == "expanded"
    y = launch(own, tokens, problem.weights)
    assert same_bits(y, *(launch(own, tokens, problem.weights, instance) for instance in INSTANCES))
    assert same_bits(y, launch(few, tokens, problem.weights))
    settle(own)
    settle(few)
    check(problem, y, *tokens)
    # fewer CTAs than panels that are expanded ahead
    one = context(spec, bound=900, num_sms=5)
    part = tuple(t[:900] for t in tokens)
    assert same_bits(launch(one, part, problem.weights), y[:900])
    settle(one)


# ---- the same bits --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [7, 300])
def test_fifty_runs(count: int) -> None:
    spec = SHAPES["narrow"]
    problem, own = problem_of(spec), context(spec)
    tokens = gpu_tokens(spec, count)
    first = launch(own, tokens, problem.weights)
    differ = torch.zeros((), dtype=torch.int64, device="cuda")
    every = list(INSTANCES)
    for run in range(51):
        y = launch(own, tokens, problem.weights, every[run % len(every)])
        differ += (y.view(torch.int16) != first.view(torch.int16)).any()
    settle(own)
    assert int(differ) == 0


@pytest.mark.parametrize("act_scale", SCALES)
def test_a_token_is_independent_of_its_company(act_scale: str) -> None:
    spec = dataclasses.replace(SHAPES["narrow"], act_scale=act_scale)
    problem, own = problem_of(spec), context(spec)
    x, ids, weights = gpu_tokens(spec, 300)
    together = launch(own, (x, ids, weights), problem.weights)
    for rows in ([0], [17], [299], [3, 5, 8, 100, 200, 250, 299], list(range(40, 140))):
        for instance in INSTANCES:
            part = launch(own, (x[rows], ids[rows], weights[rows]), problem.weights, instance)
            assert same_bits(part, together[rows]), (rows, instance)
    # experts that are crowded by others' tokens
    crowd = ids.clone()
    crowd[1:] = torch.arange(8, device="cuda")
    crowd[0] = ids[0]
    assert same_bits(launch(own, (x, crowd, weights), problem.weights)[:1], together[:1])


@pytest.mark.parametrize("num_sms", [1, 3, 78, 131])
def test_any_number_of_ctas(num_sms: int) -> None:
    problem, own, few = problem_of(SMALL), context(SMALL), context(SMALL, num_sms=num_sms)
    for count in (0, 1, 40, 300):
        tokens = gpu_tokens(SMALL, count, seed=count)
        for instance in INSTANCES:
            y = launch(few, tokens, problem.weights, instance)
            settle(few)
            assert same_bits(y, launch(own, tokens, problem.weights, instance)), (count, instance)


@pytest.mark.parametrize("act_scale", SCALES)
def test_a_thousand_launches(act_scale: str) -> None:
    """Random counts, skew and ids, nothing waited for in between: the instances against each other, some by the oracle.

    Ids are drawn anew for every call: duplicates, -1 and ids above the last expert among them, half of the calls crowd
    a few experts, some have more tokens than the workspace holds.
    """
    spec = spec_of(256, 128, 16, 4, act_scale=act_scale)
    problem, own = problem_of(spec), context(spec, bound=256)
    numbers = torch.Generator().manual_seed(11)
    device_numbers = torch.Generator("cuda").manual_seed(12)
    x, _, weights = gpu_tokens(spec, 700, seed=2)
    differ = torch.zeros((), dtype=torch.int64, device="cuda")
    for call in range(500):
        longest, first, last, shift = (int(torch.randint(n, (), generator=numbers)) for n in (257, 16, 18, 400))
        count = longest * 2 if call % 9 == 0 else longest
        lowest, highest = (-1, 17) if call % 2 else sorted((first, last))
        shape = (count, spec.top_k)
        ids = torch.randint(lowest, highest + 1, shape, device="cuda", generator=device_numbers)
        shift = min(shift, 700 - count)
        tokens = (x[shift : shift + count], ids, weights[shift : shift + count])
        y, *others = (launch(own, tokens, problem.weights, instance) for instance in INSTANCES)
        for other in others:
            differ += (y.view(torch.int16) != other.view(torch.int16)).any()
        if call % 50 == 7:
            settle(own)
            known = torch.where(ids < spec.num_experts, ids, -1)
            check(problem, y, tokens[0], known, tokens[2])
    settle(own)
    assert int(differ) == 0


# ---- the GPU around it ----------------------------------------------------------------------------------------------

_HOLD = """
extern "C" __global__ void hold_sm(long long nanoseconds) {
    extern __shared__ char all_of_it[];
    all_of_it[threadIdx.x] = 0;
    long long start, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
    do asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)); while (now - start < nanoseconds);
}
"""


@pytest.mark.parametrize("num_sms", [78, 131, None])
def test_a_busy_sm(num_sms: int | None) -> None:
    """Case C7: a kernel of another stream holds one SM; the call ends long before it."""
    problem, own = problem_of(SMALL), context(SMALL, num_sms=num_sms)
    tokens = gpu_tokens(SMALL, 300)
    free = launch(own, tokens, problem.weights)
    settle(own)
    source = KernelSource(name="hold_sm", code=_HOLD, entry="hold_sm", dynamic_shared_bytes=227 * 1024)
    side, done = torch.cuda.Stream(), torch.cuda.Event()
    hold = load(source, torch.cuda.current_device())
    hold(side.cuda_stream, 1, 32, ctypes.c_longlong(1_000_000_000))
    done.record(side)
    y = launch(own, tokens, problem.weights)
    torch.cuda.current_stream().synchronize()
    still_held = not done.query()
    settle(own)
    assert same_bits(y, free) and still_held


def test_calls_of_two_streams() -> None:
    problem, own = problem_of(SMALL), context(SMALL)
    batches = [gpu_tokens(SMALL, count, seed=count) for count in (300, 5, 64)]
    alone = [launch(own, tokens, problem.weights) for tokens in batches]
    settle(own)
    streams = [torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.current_stream()]
    results = []
    for i in range(60):
        with torch.cuda.stream(streams[i % 3]):
            results.append((i % len(batches), launch(own, batches[i % len(batches)], problem.weights)))
    settle(own)
    assert all(same_bits(y, alone[which]) for which, y in results)


def test_graph_replays_equal_eager() -> None:
    """Case C6: 24 replays with other tokens, skewed and padded ones among them, memory moving in between."""
    problem, own = problem_of(SMALL), context(SMALL)
    x, ids, weights = gpu_tokens(SMALL, 64)
    mega_moe(x, ids, weights, problem.weights, own)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = mega_moe(x, ids, weights, problem.weights, own)
    junk: list[Tensor] = []
    for replay in range(24):
        tokens = gpu_tokens(SMALL, 64, seed=100 + replay)
        if replay % 3 == 1:
            tokens[1].copy_(tokens[1] % 2)
        elif replay % 3 == 2:
            tokens[1][40:], tokens[2][40:] = -1, float("nan")
        for target, source in zip((x, ids, weights), tokens, strict=True):
            target.copy_(source)
        junk = junk[-2:] + [torch.full((1 << (18 + replay % 5),), float("nan"), device="cuda")]
        graph.replay()
        replayed = y.clone()
        assert same_bits(replayed, mega_moe(*tokens, problem.weights, own)), replay
    settle(own)


# ---- layers and weights over time -----------------------------------------------------------------------------------


def test_two_layers_on_one_workspace() -> None:
    """Case C20: 200 calls in turn without a wait, unequal counts, other shapes and scales in the same memory."""
    specs = [
        spec_of(512, 256, 8, 2),
        spec_of(1024, 320, 16, 4, activation="swiglu_clamp", swiglu_limit=2.0, act_scale="block128"),
    ]
    device = torch.device("cuda", torch.cuda.current_device())
    shared = DeviceWorkspace(specs, Collectives(resolve_group(None), device, 60.0), max_tokens_per_rank=512)
    problems = [gpu_problem(spec, seed) for seed, spec in enumerate(specs)]
    contexts = [context(spec, bound=512, workspace=shared) for spec in specs]
    batches = [[gpu_tokens(spec, count, seed=count) for count in (512, 3, 0, 77)] for spec in specs]
    wanted = []
    for spec, problem, tokens in zip(specs, problems, batches, strict=True):
        alone = context(spec, bound=512)
        wanted.append([launch(alone, t, problem.weights) for t in tokens])
        check(problem, wanted[-1][0], *tokens[0])
    for own, problem, tokens in zip(contexts, problems, batches, strict=True):
        launch(own, tokens[0], problem.weights)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    differ = torch.zeros((), dtype=torch.int64, device="cuda")
    for call in range(200):
        layer, which = call % 2, call // 2 % 4
        y = launch(contexts[layer], batches[layer][which], problems[layer].weights)
        differ += (y.view(torch.int16) != wanted[layer][which].view(torch.int16)).any()
    del y
    settle(contexts[0])
    assert int(differ) == 0 and torch.cuda.memory_allocated() <= before + 4096


def test_new_weights_between_replays() -> None:
    """Case C20: one expert, then all; the graph reads the new ones at the old addresses."""
    first, second = gpu_problem(SMALL, 1), gpu_problem(SMALL, 2)
    own, tokens = context(SMALL), gpu_tokens(SMALL, 64)
    experts = local_weights(first, 0, 1)
    backend: Any = own.backend
    mega_moe(*tokens, experts, own)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = mega_moe(*tokens, experts, own)
    address = backend.packed(experts).w13.data.data_ptr()
    for changed in (slice(3, 4), slice(None)):
        for name in ("w13", "w2", "w13_scale", "w2_scale"):
            getattr(experts, name)[changed] = getattr(second.weights, name)[changed]
        assert backend.packed(experts).w13.data.data_ptr() == address
        graph.replay()
        fresh = mega_moe(
            *tokens, local_weights(Problem(SMALL, first.w13, first.w2, None, None, experts), 0, 1), context(SMALL)
        )
        assert same_bits(y.clone(), fresh)
    check(second, fresh, *tokens)
    settle(own)


def test_contexts_come_and_go() -> None:
    problem, tokens = problem_of(SMALL), gpu_tokens(SMALL, 40)
    used = []
    for _ in range(50):
        own = context(SMALL, bound=64)
        launch(own, tokens, problem.weights)
        own.close()
        del own
        gc.collect()
        torch.cuda.synchronize()
        used.append(torch.cuda.memory_allocated())
    assert used[-1] <= used[1], f"{used[-1] - used[1]} bytes more after 50 rounds"


def test_the_layer_by_default() -> None:
    overrides = ["parallel.expert_parallel_size=1", "launch.nproc=1"]
    with torch.no_grad():
        layer = MoELayer(MoEConfig.from_yaml("quickstart", overrides), device="cuda")
        assert layer.context is not None and layer.context.backend_name == "sm90"
        config = MoEConfig.from_yaml("quickstart", [*overrides, "kernel.backend=reference"])
        reference = MoELayer(config, device="cuda")
        reference.load_state_dict(layer.state_dict())
        for count in (1, 33, 700):
            x = torch.randn(count, layer.spec.hidden, dtype=torch.bfloat16, device="cuda")
            verdict = compare(layer(x), reference(x), "quantised")
            print(verdict.text)
            assert verdict.ok, verdict.text


@pytest.mark.parametrize("hidden", [512, 576])  # whole vectors of scales a token, and not
@pytest.mark.parametrize("act_scale", SCALES)
@pytest.mark.parametrize("clamp", [None, 1.0])
def test_the_functions_with_public_names(clamp: float | None, act_scale: str, hidden: int) -> None:
    options = {} if clamp is None else {"activation": "swiglu_clamp", "swiglu_limit": clamp}
    spec = spec_of(hidden, 320, 8, 2, weight_position="before", act_scale=act_scale, **options)
    problem, (x, ids, weights) = gpu_problem(spec), gpu_tokens(spec, 100)
    option: dict[str, str] = {"act_scale": "token"} if act_scale == "token" else {}  # the other one is the default
    buffer = megamoe.get_symm_buffer_for_mega_moe(None, 8, 128, 2, hidden, 320, **option)
    experts = problem.weights
    l1, l2 = megamoe.transform_weights_for_mega_moe(
        (experts.w13, experts.w13_scale),
        (experts.w2, experts.w2_scale),  # type: ignore[arg-type]
    )
    values, scale = quantize_e4m3(x, act_scale)
    buffer.x[:100].copy_(values)
    buffer.x_sf[:100].copy_(scale.view(100, -1))
    buffer.topk_idx[:100].copy_(ids)
    buffer.topk_weights[:100].copy_(weights)
    y, stats = torch.empty_like(x), torch.zeros(8, dtype=torch.int32, device="cuda")
    megamoe.fp8_fp4_mega_moe(y, l1, l2, buffer, stats, activation_clamp=clamp)
    torch.cuda.synchronize()
    buffer.workspace.check()
    check(problem, y, x, ids, weights)
    assert same_bits(y, launch(context(spec), (x, ids, weights), experts))
    assert torch.equal(stats.long(), torch.bincount(ids.flatten(), minlength=8))
    buffer.destroy()
