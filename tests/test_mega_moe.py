"""The host side of the mega-kernel without a GPU: refusals, sizes, order of launches, failures, weights that change."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("megamoe._host", reason="the C++ engine is not built")

from helpers_dist import run_ranks  # noqa: E402
from helpers_mega import FakeGpu, FakePlan, HostMemory, make_workspace, mega_spec, record_launches  # noqa: E402
from helpers_moe import local_weights, make_problem, make_tokens  # noqa: E402

import megamoe.backends.sm90 as sm90  # noqa: E402
import megamoe.device_workspace as device_workspace  # noqa: E402
from megamoe.backends import choose_backend, unavailable  # noqa: E402
from megamoe.backends.base import BackendSetup  # noqa: E402
from megamoe.comm.collectives import Collectives  # noqa: E402
from megamoe.comm.groups import RankGroup, resolve_group  # noqa: E402
from megamoe.config import MoEConfig, MoESpec  # noqa: E402
from megamoe.device_workspace import DeviceWorkspace  # noqa: E402
from megamoe.errors import BackendUnavailable, ConfigError, MegaMoeError, MegaMoETimeout  # noqa: E402
from megamoe.kernels.jit import JitSettings, KernelSource, build  # noqa: E402
from megamoe.kernels.mega_moe import (  # noqa: E402
    ACT_SCALES,
    INSTANCES,
    FaultRecord,
    _usable,
    layer_shape,
    mega_moe_sources,
    published_row_bytes,
    scratch_bytes,
    select_instance,
    workspace_limits,
    workspace_numbers,
)
from megamoe.kernels.warmup import warmup_sources  # noqa: E402

GPU = torch.device("cuda", 0)
MIB = 1 << 20


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    return record_launches(monkeypatch)


def backend(spec: MoESpec | None = None, **changes: Any) -> sm90.Sm90Backend:
    collectives = Collectives(RankGroup(None, 0, 1, (0,)), torch.device("cpu"), 3.0)
    options: dict[str, Any] = dict(max_tokens_per_rank=64, overflow="chunk", check=False)
    setup = BackendSetup(
        spec=spec or mega_spec(), collectives=collectives, device=torch.device("cpu"), **{**options, **changes}
    )
    return sm90.Sm90Backend(setup)


def record_of(workspace: DeviceWorkspace) -> FaultRecord:
    """Return the record as the kernel sees it."""
    return FaultRecord.from_address(workspace._record_memory.data_ptr())


# ---- what it cannot run ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "world_size", "reason"),
    [
        (
            {"weight_format": "none", "act_scale": "none"},
            1,
            "it multiplies mxfp4 weights, this layer has quantization.weights: none",
        ),
        ({"weight_format": "fp8_block"}, 1, "this layer has quantization.weights: fp8_block"),
        ({}, 3, "num_experts must be a multiple of the 3 ranks, got 8"),
        ({"num_experts": 384}, 1, "a rank can have 256 experts at most, got 384"),
    ],
)
def test_what_the_kernel_does_not_do(changes: dict[str, Any], world_size: int, reason: str) -> None:
    found = sm90.unsupported(mega_spec(**changes), world_size)
    assert found is not None and reason in found and not found.endswith(".")


def test_scales_that_the_kernel_takes() -> None:
    """A granularity that it does not know, as one to come, is refused by name."""
    assert [sm90.unsupported(mega_spec(act_scale=scale), 1) for scale in ACT_SCALES] == [None, None]
    spec = mega_spec()
    object.__setattr__(spec, "act_scale", "block64")
    reason = "it takes activation scales per token or block128, this layer has quantization.act_scale: block64"
    assert sm90.unsupported(spec, 1) == reason


def test_what_the_machine_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = mega_spec()
    assert unavailable("sm90", spec, torch.device("cpu"), 1) == "it runs on NVIDIA Hopper GPUs, the tensors are on cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert unavailable("sm90", spec, GPU, 1) == "torch finds no CUDA device"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    found = unavailable("sm90", spec, GPU, 1)
    assert found == "it needs a GPU of compute capability 9.0, cuda:0 has 8.0"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert unavailable("sm90", spec, GPU, 8) is None
    assert choose_backend("auto", spec, GPU, 8).name == "sm90"
    monkeypatch.setattr(sm90, "find_spec", lambda name: None)
    assert "cuda.core is not installed" in str(unavailable("sm90", spec, GPU, 1))
    with pytest.raises(BackendUnavailable, match="kernel.backend: sm90 cannot run here: cuda.core is not installed"):
        choose_backend("sm90", spec, GPU, 1)


# ---- sizes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("act_scale", ACT_SCALES)
@pytest.mark.parametrize(("preset", "limit"), [("deepseek_v4_flash", 640), ("deepseek_v4_pro", 1050)])
def test_bytes_of_a_share_of_eight(preset: str, limit: int, act_scale: str) -> None:
    spec = dataclasses.replace(MoEConfig.from_yaml(preset).spec, weight_format="mxfp4", act_scale=act_scale)
    nbytes = DeviceWorkspace.bytes_for([spec], world_size=8, max_tokens_per_rank=8192)
    print(f"{preset} {act_scale}: {nbytes / MIB:.0f} MiB")
    assert nbytes <= limit * MIB


@pytest.mark.parametrize("hidden", [256, 2880, 4096])
def test_bytes_of_scales_per_128(hidden: int) -> None:
    """A vector or more of them beside each row of x, and one for each K step beside each row of ring 1; no more."""
    token, block = (mega_spec(hidden=hidden, act_scale=scale) for scale in ACT_SCALES)
    steps = -(-hidden // 128)
    assert published_row_bytes(token) == (hidden, 4)
    assert published_row_bytes(block) == (hidden, (4 * steps + 15) // 16 * 16)
    assert [b - t for t, b in zip(layer_shape(token), layer_shape(block), strict=True)] == [
        *[0] * 5,
        published_row_bytes(block)[1] - 4,
        4 * steps,
        *[0] * 2,
    ]
    few, many = (DeviceWorkspace.bytes_for([spec], world_size=8, max_tokens_per_rank=8192) for spec in (token, block))
    assert few < many < 1.05 * few


def test_kernels_of_the_layers_granularities_are_loaded(gpu: FakeGpu) -> None:
    for scales in (["token"], ["block128"], ["token", "block128"]):
        make_workspace([mega_spec(act_scale=scale) for scale in scales])
        assert gpu.loaded_scales == set(scales)
        names = [source.name for source in mega_moe_sources(act_scales=scales)]
        assert len(set(names)) == len(names) == len(INSTANCES) * len(scales)
        assert sum("block128" in name for name in names) == len(INSTANCES) * scales.count("block128")


@pytest.mark.parametrize(
    "tokens, world_size, name",
    [
        (1, 1, "decode"),
        (208, 1, "decode"),
        (214, 1, "wide"),
        (26, 8, "decode"),
        (800, 1, "wide"),
        (801, 1, "prefill"),
        (3413, 1, "prefill"),
        (3414, 1, "expanded"),
        (427, 8, "expanded"),
    ],
)
def test_the_instance_follows_the_rows_of_an_expert(tokens: int, world_size: int, name: str) -> None:
    spec = mega_spec(num_experts=32, top_k=6)
    assert select_instance(spec, tokens, world_size).name == name
    block = dataclasses.replace(spec, act_scale="block128")
    assert select_instance(block, tokens, world_size).name == name


def test_more_tokens_never_choose_an_instance_for_fewer_rows() -> None:
    """A quarter of a row a token: both sides of every bound, and what a workspace must be ready for."""
    order = ["decode", "wide", "prefill", "expanded"]
    assert set(order) == set(INSTANCES)
    spec, seen = mega_spec(), [""]
    for tokens in range(2700):
        name = select_instance(spec, tokens, 1).name
        if name != seen[-1]:
            seen.append(name)
            assert tokens == {"decode": 0, "wide": 161, "prefill": 601, "expanded": 2561}[name]
        assert _usable(spec, tokens, 1) == seen[1:]
    assert seen[1:] == order
    # 64 rows a token: no number of them runs the first instance, which then costs nothing
    assert select_instance(mega_spec(top_k=8), 1, 64).name == "wide"
    assert _usable(mega_spec(top_k=8), 11, 64) == order


@pytest.mark.parametrize(("hidden", "intermediate", "mib"), [(4096, 2048, 112), (7168, 3072, 196), (320, 1056, 31.5)])
def test_bytes_of_scratch_memory(hidden: int, intermediate: int, mib: float) -> None:
    """A panel is 256 bytes a column of the deeper linear, in whole K steps; the stash depends on the CTAs alone."""
    spec = mega_spec(hidden=hidden, intermediate=intermediate)
    stash = 132 * 256 * 68 * 4
    assert scratch_bytes(spec, 132, ["decode", "wide"]) == 0
    assert scratch_bytes(spec, 132, ["decode", "wide", "prefill"]) == stash
    assert scratch_bytes(spec, 132, ["expanded"]) == scratch_bytes(spec, 132, list(INSTANCES)) == int(mib * MIB)
    assert stash < mib * MIB


def test_the_reported_bytes_are_allocated(gpu: FakeGpu) -> None:
    specs = [mega_spec(), mega_spec(hidden=512, intermediate=128), mega_spec(num_experts=16, top_k=4)]
    workspace = make_workspace(specs)
    assert workspace.nbytes == DeviceWorkspace.bytes_for(specs, world_size=1, max_tokens_per_rank=64)
    assert workspace.tensor.numel() == workspace.nbytes and gpu.loaded == 1
    assert all(workspace.serves(spec, 64) for spec in specs)
    assert not workspace.serves(specs[0], 65) and not workspace.serves(mega_spec(hidden=4096), 64)
    assert not workspace.serves(mega_spec(num_experts=32), 64)
    # the control region is where every layer looks for it
    control = {workspace_numbers(spec, workspace.limits)["control_bytes"] for spec in specs}
    assert len(control) == 1
    # limits of one layer are smaller than those of all
    assert workspace_limits(specs[0], 1, 64) != workspace.limits


def test_memory_that_is_too_small_is_refused(gpu: FakeGpu) -> None:
    with pytest.raises(ValueError, match=r"memory: needs \d+ bytes of a GPU, got 4096"):
        make_workspace([mega_spec()], memory=HostMemory(4096))
    with pytest.raises(ValueError, match="specs: at least one layer"):
        make_workspace([])


# ---- launches -------------------------------------------------------------------------------------------------------


def test_forward_gives_the_kernel_what_it_takes(gpu: FakeGpu) -> None:
    spec = mega_spec()
    own, problem = backend(spec), make_problem(spec)
    x, ids, weights = make_tokens(spec, 9, dtype=torch.float32)
    y = own.forward(x, ids, weights, problem.weights)
    assert y.dtype == torch.float32 and y.shape == x.shape and bool((y == 1).all())
    (call,) = FakePlan.launches
    assert torch.equal(call["x"], x.to(torch.bfloat16)) and call["x"].is_contiguous()
    assert call["ids"].data_ptr() == ids.data_ptr() and call["stream"] == 1
    assert call["plan"].options["timeout_s"] == 3.0 and call["plan"].limits == own.workspace.limits
    assert call["plan"].options["bases"].tolist() == [own.workspace.tensor.data_ptr()]
    # strided and misaligned views come as whole rows
    wide = torch.randn(9, 2 * spec.hidden, dtype=torch.bfloat16)
    odd = torch.randn(9 * spec.hidden + 1, dtype=torch.bfloat16)[1:].view(9, spec.hidden)
    for view in (wide[:, ::2], odd):
        own.forward(view, ids.t().contiguous().t(), weights, problem.weights)
        call = FakePlan.launches[-1]
        assert torch.equal(call["x"], view) and call["x"].is_contiguous() and call["x"].data_ptr() % 16 == 0
        assert torch.equal(call["ids"], ids) and call["ids"].is_contiguous()


def test_out_is_written_to(gpu: FakeGpu) -> None:
    spec = mega_spec()
    own, problem = backend(spec), make_problem(spec)
    x, ids, weights = make_tokens(spec, 5, dtype=torch.bfloat16)
    out = torch.zeros_like(x)
    assert own.forward_into(x, ids, weights, problem.weights, out) is out
    assert FakePlan.launches[-1]["out"] is out
    # where the kernel cannot write there itself, the result is copied
    for out in (torch.zeros(5, spec.hidden), torch.zeros(5, 2 * spec.hidden, dtype=torch.bfloat16)[:, ::2]):
        rows = x.to(out.dtype)
        assert own.forward_into(rows, ids, weights, problem.weights, out) is out and bool((out == 1).all())


def test_too_many_tokens(gpu: FakeGpu) -> None:
    """Case C4 on one rank: chunks, or an error that leaves the backend usable."""
    spec = mega_spec()
    problem = make_problem(spec)
    x, ids, weights = make_tokens(spec, 131, dtype=torch.bfloat16)
    own = backend(spec)
    y = own.forward(x, ids, weights, problem.weights)
    (call,) = FakePlan.launches  # the kernel makes chunks of them
    assert torch.equal(call["x"], x) and len(call["ids"]) == 131 and bool((y == 1).all())
    assert call["plan"].options["refuses"] is False and call["refused"] == 0
    strict = backend(spec, overflow="error")
    with pytest.raises(ConfigError, match="rank 0 brought 131 tokens, the bound is 64; raise it or set parallel.over"):
        strict.forward(x, ids, weights, problem.weights)
    assert len(FakePlan.launches) == 1
    strict.forward(x[:64], ids[:64], weights[:64], problem.weights)
    assert FakePlan.launches[-1]["plan"].options["refuses"] is True
    # one of several ranks takes part without tokens, so that nobody waits for it
    strict.workspace.world_size = 2
    with pytest.raises(ConfigError, match="rank 0 brought 131 tokens, the bound is 64; raise it or set parallel.over"):
        strict.forward(x, ids, weights, problem.weights)
    call = FakePlan.launches[-1]
    assert len(FakePlan.launches) == 3 and call["refused"] == 131
    assert all(len(call[name]) == 0 for name in ("x", "ids", "weights", "out"))
    # rows that lie in the workspace already are those of one chunk
    with pytest.raises(ConfigError, match="rank 0 brought 131 tokens to one call, the workspace holds 64; raise it"):
        own.workspace.launch(own._ready(problem.weights).plan, None, ids, weights, y)


def test_a_call_that_a_rank_overfilled_is_told_once(gpu: FakeGpu) -> None:
    own = backend(mega_spec(), overflow="error")
    fail(own.workspace, 4, 0, seen=131, expected=64)
    with pytest.raises(
        MegaMoeError, match="max_tokens_per_rank: rank 0 brought 131 tokens, the bound is 64; raise it or"
    ):
        own.workspace.check()
    own.workspace.check()


def test_streams_wait_for_each_other(gpu: FakeGpu) -> None:
    spec = mega_spec()
    problem, tokens = make_problem(spec), make_tokens(spec, 3, dtype=torch.bfloat16)
    # two workspaces of one GPU: what counts is the GPU
    first, second = backend(spec, max_tokens_per_rank=64), backend(spec, max_tokens_per_rank=32)
    first.forward(*tokens, problem.weights)
    first.forward(*tokens, problem.weights)
    assert gpu.ordered == []
    gpu.current = 2
    second.forward(*tokens, problem.weights)
    first.forward(*tokens, problem.weights)
    assert gpu.ordered == [(1, 2)]
    gpu.current = 1
    second.forward(*tokens, problem.weights)
    assert gpu.ordered == [(1, 2), (2, 1)]
    # a capture waits for nothing outside, and nothing outside for it; its own streams wait for each other
    gpu.capture, gpu.current = 7, 3
    first.forward(*tokens, problem.weights)
    gpu.current = 4
    second.forward(*tokens, problem.weights)
    assert gpu.ordered[2:] == [(3, 4)]
    gpu.capture, gpu.current = 8, 5
    first.forward(*tokens, problem.weights)
    gpu.capture, gpu.current = 0, 1
    first.forward(*tokens, problem.weights)
    assert gpu.ordered[3:] == []


def test_contexts_share_a_workspace_and_its_scratch(gpu: FakeGpu) -> None:
    spec = mega_spec()
    first, second = backend(spec), backend(spec)
    assert first.workspace is second.workspace
    assert backend(mega_spec(hidden=512)).workspace is not first.workspace
    tokens = make_tokens(spec, 3, dtype=torch.bfloat16)
    for seed in (1, 2):
        first.forward(*tokens, make_problem(spec, seed=seed).weights)
    scratches = {plan.scratch.data_ptr() for plan in FakePlan.made}
    assert len(FakePlan.made) == 2 and len(scratches) == 1
    with pytest.raises(ValueError, match="workspace: too small for this layer"):
        backend(mega_spec(hidden=1024), workspace=first.workspace)


# ---- weights that change --------------------------------------------------------------------------------------------


def test_changed_weights_are_packed_again_in_place(gpu: FakeGpu) -> None:
    spec = mega_spec(expert_bias=True)
    own, tokens = backend(spec), make_tokens(spec, 3, dtype=torch.bfloat16)
    first, second = make_problem(spec, seed=1), make_problem(spec, seed=2)
    experts = local_weights(first, 0, 1)
    own.forward(*tokens, experts)
    packed = own.packed(experts)
    before = packed.w13.data.clone()
    addresses = [t.data_ptr() for t in (packed.w13.data, packed.w2.data, packed.w13.row_scale, packed.w2.row_scale)]
    own.forward(*tokens, experts)
    assert own.packed(experts) is packed and torch.equal(packed.w13.data, before)
    for name in ("w13", "w2", "w13_scale", "w2_scale", "b13", "b2"):
        getattr(experts, name).copy_(getattr(second.weights, name))
    own.forward(*tokens, experts)
    assert own.packed(experts) is packed and len(FakePlan.made) == 1
    now = [t.data_ptr() for t in (packed.w13.data, packed.w2.data, packed.w13.row_scale, packed.w2.row_scale)]
    assert now == addresses
    back = own.unpacked(experts)
    for name in ("w13", "w2", "w13_scale", "w2_scale"):
        assert torch.equal(getattr(back, name), getattr(second.weights, name)), name
    assert packed.b2 is not None and second.b2 is not None
    assert torch.equal(packed.b2[:, : spec.hidden], second.weights.b2.float())  # type: ignore[union-attr]
    # tensors that are gone leave nothing behind
    for seed in range(3, 8):
        own.forward(*tokens, local_weights(make_problem(spec, seed=seed), 0, 1))
    assert len(own._cache) <= 2


def test_wrong_weights_are_refused(gpu: FakeGpu) -> None:
    own, spec = backend(), mega_spec()
    other = make_problem(mega_spec(hidden=512))
    with pytest.raises(ValueError, match="w13"):
        own.forward(*make_tokens(spec, 3, dtype=torch.bfloat16), other.weights)


def test_weights_are_not_packed_inside_a_capture(gpu: FakeGpu) -> None:
    own, spec = backend(), mega_spec()
    tokens, experts = make_tokens(spec, 3, dtype=torch.bfloat16), local_weights(make_problem(spec), 0, 1)
    gpu.capture = 5
    with pytest.raises(MegaMoeError, match="call the layer\\s+once before capturing a graph"):
        own.forward(*tokens, experts)
    gpu.capture = 0
    own.forward(*tokens, experts)
    gpu.capture = 6
    own.forward(*tokens, experts)
    experts.w2.add_(1)
    with pytest.raises(MegaMoeError, match="once before capturing a graph"):
        own.forward(*tokens, experts)


# ---- failures -------------------------------------------------------------------------------------------------------


def test_ids_are_checked_in_checked_mode(gpu: FakeGpu) -> None:
    spec = mega_spec()
    problem = make_problem(spec)
    x, ids, weights = make_tokens(spec, 6, dtype=torch.bfloat16)
    ids[2, 1], ids[3, 0], ids[4, 0] = 8, 1000, -1
    backend(spec).forward(x, ids, weights, problem.weights)  # the kernel drops them
    with pytest.raises(MegaMoeError, match="topk_ids: rank 0 has 2 ids above the last expert; valid are 0 to 7, or -1"):
        backend(spec, check=True).forward(x, ids, weights, problem.weights)
    x, ids, weights = make_tokens(spec, 70, dtype=torch.bfloat16)
    strict = backend(spec, check=True, overflow="error")
    with pytest.raises(MegaMoeError, match="rank 0 brought 70 tokens, the bound is 64"):
        strict.forward(x, ids, weights, problem.weights)
    backend(spec, check=True).forward(x, ids, weights, problem.weights)


def fail(workspace: DeviceWorkspace, status: int, phase: int, **numbers: int) -> None:
    record = record_of(workspace)
    record.phase, record.whom, record.generation = phase, 0, numbers.get("generation", 1)
    record.seen, record.expected = numbers.get("seen", 0), numbers.get("expected", 0)
    for i, number in enumerate((512, 128, 16, 4)):
        record.seen_shape[i] = number if status == 3 else 0
        record.own_shape[i] = (256, 320, 8, 2)[i]
    record.status = status


@pytest.mark.parametrize(
    ("status", "phase", "error", "words"),
    [
        (1, 4, MegaMoETimeout, r"combine: rank 0 waited for rank 0, which did not answer in time \(saw 0x100000000, "),
        (2, 0, MegaMoETimeout, "publish: rank 0 stopped because rank 0 did not answer a rank in time; all ranks must"),
        (2, 0x40, MegaMoeError, "publish: rank 0 and rank 0 called different layers, rank 0 .hidden 256, intermediate"),
        (
            3,
            0,
            MegaMoeError,
            r"publish: .*different layers: rank 0 \(hidden 512, intermediate 128, 16 experts, top-4\), rank 0 \(hidden "
            r"256, intermediate 320, 8 experts, top-2\)",
        ),
    ],
)
def test_a_failed_call_is_told_by_the_next(
    gpu: FakeGpu, status: int, phase: int, error: type[Exception], words: str
) -> None:
    spec = mega_spec()
    own, problem, tokens = backend(spec), make_problem(spec), make_tokens(spec, 3, dtype=torch.bfloat16)
    own.forward(*tokens, problem.weights)
    own.workspace.check()
    fail(own.workspace, status, phase, seen=1 << 32, expected=1 << 33)
    for call in (own.workspace.check, lambda: own.forward(*tokens, problem.weights), own.workspace.check):
        with pytest.raises(error, match=words):
            call()
    assert len(FakePlan.launches) == 1
    own.workspace.reset()
    own.workspace.check()
    own.forward(*tokens, problem.weights)
    assert len(FakePlan.launches) == 2


def test_reset_clears_the_control_region_and_moves_on(gpu: FakeGpu) -> None:
    spec = mega_spec()
    workspace = make_workspace([spec])
    numbers = workspace_numbers(spec, workspace.limits)
    control, first = numbers["control_bytes"], numbers["generation"]
    workspace.tensor.fill_(0xA5)
    workspace.tensor[first : first + 4].view(torch.int32).fill_(41)
    fail(workspace, 1, 0)
    workspace.reset()
    words = workspace.tensor[:control].view(torch.int32)
    assert int(words[first // 4]) == 43 and int(words.count_nonzero()) == 1
    assert bool((workspace.tensor[control:] == 0xA5).all())
    assert record_of(workspace).status == 0 and gpu.synchronized >= 2
    # a mismatch that the others name this rank in: the first of them is named
    first = numbers["aborts"]
    workspace._aborts.fill_(1)
    workspace.rank = 5
    fail(workspace, 2, 0x40)
    record_of(workspace).whom = 5
    with pytest.raises(MegaMoeError, match="publish: rank 5 and rank 0 called different layers"):
        workspace.check()
    assert workspace._aborts.data_ptr() == workspace.tensor.data_ptr() + first
    workspace.close()
    assert workspace._memory.closed  # type: ignore[attr-defined]


# ---- compiling ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", mega_moe_sources(), ids=lambda source: source.name)
def test_instances_compile_without_spills(source: KernelSource, tmp_path: Path) -> None:
    """The static asserts of the source hold the host's numbers against the kernel's own."""
    pytest.importorskip("cuda.bindings.nvrtc", reason="cuda.core with NVRTC is not installed (megamoe[cuda13])")
    usage = build(source, JitSettings(cache_dirs=(tmp_path,))).usage
    assert usage.static_shared_bytes == 0 and usage.is_clean, usage
    assert not usage.serialized, usage


@pytest.mark.parametrize("source", mega_moe_sources(traced=True), ids=lambda source: source.name)
def test_traced_instances_compile(source: KernelSource, tmp_path: Path) -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="cuda.core with NVRTC is not installed (megamoe[cuda13])")
    usage = build(source, JitSettings(cache_dirs=(tmp_path,))).usage
    assert usage.static_shared_bytes == 0, usage


@pytest.mark.parametrize("act_scale", ACT_SCALES)
def test_warmup_compiles_what_a_layer_launches(act_scale: str) -> None:
    config = MoEConfig.from_yaml("deepseek_v4_flash", [f"quantization.act_scale={act_scale}"])
    names = {source.name for source in warmup_sources(config)}
    all_names = {source.name for source in mega_moe_sources()}
    assert names & all_names == {source.name for source in mega_moe_sources(act_scales=[config.spec.act_scale])}
    other = MoEConfig.from_yaml("deepseek_v4_flash", ["quantization.weights=fp8_block"])
    assert not all_names & {source.name for source in warmup_sources(other)}


@pytest.mark.parametrize("scales", ["", "#define MEGAMOE_BLOCK128\n"], ids=ACT_SCALES)
@pytest.mark.parametrize("trace", ["", "#define MEGAMOE_TRACE\n"], ids=["normal", "traced"])
def test_shared_memory_holds_the_most_experts(trace: str, scales: str, tmp_path: Path) -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="cuda.core with NVRTC is not installed (megamoe[cuda13])")
    sums = 4 * (3 * sm90.MAX_LOCAL_EXPERTS + 2)
    forms = {"wide": "#define MEGAMOE_WIDE\n", "expanded": "#define MEGAMOE_EXPAND 2\n"}
    for name, instance in INSTANCES.items():
        code = trace + scales + forms.get(name, "")
        code += f'#include "megamoe/impls/mega_moe/{instance.header}.cuh"\n'
        code += f"static_assert(megamoe::impls::{instance.header}::kFixedBytes + {sums} <= 227 * 1024, "
        code += '"the sums do not fit");\nextern "C" __global__ void nothing() {}\n'
        build(KernelSource(name="nothing", code=code, entry="nothing"), JitSettings(cache_dirs=(tmp_path,)))


# ---- several ranks --------------------------------------------------------------------------------------------------


def run_two(rank: int, world_size: int, arguments: Any) -> dict[str, str]:
    """Two processes without a GPU: what the ranks agree on by the host."""
    device_workspace.MegaMoePlan = FakePlan  # type: ignore[assignment,misc]
    spec, cpu = mega_spec(), torch.device("cpu")
    collectives = Collectives(resolve_group(dist.group.WORLD), cpu, 20.0)

    def workspace(bound: int, specs: list[MoESpec]) -> DeviceWorkspace:
        nbytes = DeviceWorkspace.bytes_for(specs, world_size=2, max_tokens_per_rank=bound)
        return DeviceWorkspace(
            specs, collectives, max_tokens_per_rank=bound, memory=HostMemory(nbytes, rank), gpu=FakeGpu()
        )

    def message_of(call: Any) -> str:
        with pytest.raises(MegaMoeError) as caught:
            call()
        return f"{type(caught.value).__name__}: {caught.value}"

    found = {
        "bounds": message_of(lambda: workspace(64 if rank else 128, [spec])),
        "layers": message_of(lambda: workspace(64, [spec, *([mega_spec(hidden=1024)] if rank else [])])),
    }
    shared = workspace(64, [spec])
    setup = BackendSetup(
        spec=spec,
        collectives=collectives,
        device=cpu,
        max_tokens_per_rank=64,
        overflow="error",
        check=True,
        workspace=shared,
    )
    own, experts = sm90.Sm90Backend(setup), local_weights(make_problem(spec), rank, 2)
    many = make_tokens(spec, 65 if rank else 3, dtype=torch.bfloat16)
    found["overflow"] = message_of(lambda: own.forward(*many, experts))
    x, ids, weights = make_tokens(spec, 3, dtype=torch.bfloat16)
    if rank == 0:
        ids[0] = 8
    found["ids"] = message_of(lambda: own.forward(x, ids, weights, experts))
    shared._generation.fill_((5, 9)[rank])
    fail(shared, 1, 0)
    found["failed"] = message_of(shared.check)
    shared.reset()
    found["generation"] = str(int(shared._generation))
    x, ids, weights = make_tokens(spec, 3 * rank, dtype=torch.bfloat16)
    assert own.forward(x, ids, weights, experts).shape == x.shape and len(FakePlan.launches) == 1
    return found


def test_two_ranks_agree_on_the_host() -> None:
    results = run_ranks(2, "test_mega_moe:run_two", timeout_s=120)
    for found in results:
        assert "ConfigError: parallel.max_tokens_per_rank and the layers" in found["bounds"]
        assert "got 128 tokens on rank 0 and 64 on rank 1" in found["bounds"]
        assert "got 64 tokens on rank 0 and 64 on rank 1 (" in found["layers"] and "bytes)" in found["layers"]
        assert found["overflow"].endswith(
            "rank 1 brought 65 tokens, the bound is 64; raise it or set parallel.overflow: chunk"
        )
        assert "topk_ids: rank 0 has 2 ids above the last expert; valid are 0 to 7" in found["ids"]
        assert found["generation"] == "11"
    assert "publish: rank 1 waited for rank 0" in results[1]["failed"]


def test_more_tokens_or_ranks_than_a_row_can_name() -> None:
    spec = MoESpec(hidden=256, intermediate=128, num_experts=1024, top_k=8, weight_format="mxfp4", act_scale="token")
    assert workspace_limits(spec, 8, 2**19 - 1)[1] == 2**19 - 1
    with pytest.raises(ValueError, match="524288 tokens of top-8 are too many for the mega-kernel; at most 524287"):
        workspace_limits(spec, 8, 2**19)
    with pytest.raises(ValueError, match="at most 1024 ranks, got 2048"):
        workspace_limits(spec, 2048, 64)
