"""The mega-kernel's launch without a GPU: the bytes that the driver gets, and what is prepared once."""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import math
import weakref
from typing import Any

import pytest
import torch

pytest.importorskip("megamoe._host", reason="the C++ engine is not built")

from helpers_mega import mega_spec, on_the_host  # noqa: E402
from helpers_moe import local_weights, make_problem, make_tokens  # noqa: E402

import megamoe.kernels.mega_moe as mega_kernel  # noqa: E402
from megamoe.backends.sm90 import Sm90Backend  # noqa: E402
from megamoe.config import MoESpec  # noqa: E402
from megamoe.errors import MegaMoeError, MegaMoETimeout  # noqa: E402
from megamoe.functional import MoEContext, mega_moe  # noqa: E402
from megamoe.kernels.mega_moe import (  # noqa: E402
    INSTANCES,
    FaultRecord,
    MegaMoePlan,
    scratch_bytes,
    shape_hash,
    workspace_limits,
)

CPU = torch.device("cpu")


class Driver:
    """Stands for `jit.driver.Driver`: keeps the arguments of every launch, and the address of every tensor map."""

    def __init__(self) -> None:
        self.launches: list[Any] = []
        self.maps: list[int] = []

    def encode_tensor_map(self, target: int, address: int, *_: object) -> None:
        self.maps.append(address)

    def launch(self, config: Any, function: Any, parameters: Any, extra: None) -> int:
        address = ctypes.c_void_p.from_address(parameters.value).value
        size = ctypes.sizeof(mega_kernel._Args)
        self.launches.append(mega_kernel._Args.from_buffer_copy(ctypes.string_at(address or 0, size)))
        return 0


def test_every_call_has_its_own_arguments_and_shares_what_is_prepared() -> None:
    spec, driver = mega_spec(), Driver()
    with on_the_host(driver), torch.no_grad():
        own = MoEContext(spec, None, "sm90", device=CPU, max_tokens_per_rank=300)
        experts = make_problem(spec).weights
        backend: Any = own.backend
        i32, i64 = torch.int32, torch.int64
        for count, dtype in ((3, i64), (0, i64), (3, i32), (5, i64), (300, i32)):
            x, ids, weights = make_tokens(spec, count, dtype=torch.bfloat16)
            ids, out = ids.to(dtype), torch.empty_like(x)
            assert mega_moe(x, ids, weights, experts, own, out=out) is out
            args = driver.launches[-1]
            given = (args.x, args.ids, args.weights, args.out, args.num_tokens, args.id_bytes, args.received)
            assert given == (*(t.data_ptr() for t in (x, ids, weights, out)), count, dtype.itemsize, 0)
        packed = backend.packed(experts)
        assert (args.w13, args.w2) == (packed.w13.data.data_ptr(), packed.w2.data.data_ptr())
        assert args.shape_hash == shape_hash(spec) and args.rank == 0 and args.num_local_experts == 8
        workspace = backend.workspace
        numbers = mega_kernel.workspace_numbers(spec, workspace.limits)
        assert args.base == workspace.tensor.data_ptr()
        assert tuple(args.at)[:2] == (numbers["input"], numbers["scales"])
        # few tokens and many: two instances, each with a map of either ring
        assert len(driver.launches) == 5 and len(driver.maps) == 2 * 2
        before = len(driver.maps)
        plan = backend._ready(experts).plan
        received = torch.zeros(8, dtype=torch.int32)
        for instance in INSTANCES.values():
            plan.launch(None, ids, weights, out, 1, instance=instance, received=received)
            args = driver.launches[-1]
            assert (args.x, args.received) == (0, received.data_ptr())
            assert tuple(args.tile)[0] == instance.block_rows
        assert len(driver.maps) == before + 2 * (len(INSTANCES) - 1), "the other instances"
        for blocks in (1, 8, 1):  # of the same name, as benchmarks vary them
            other = dataclasses.replace(INSTANCES["wide"], unit_blocks=blocks)
            plan.launch(None, ids, weights, out, 1, instance=other)
            assert tuple(driver.launches[-1].tile)[1] == min(blocks, 2)
        other = dataclasses.replace(INSTANCES["wide"], box_rows=64)  # the same tiles, another kernel
        assert plan.prepared(64, other) is not plan.prepared(64, INSTANCES["wide"])


def test_scratch_memory_grows_and_prepared_launches_keep_theirs() -> None:
    """What few tokens need is nothing; instances asked for by name, and many tokens, bring what they need."""
    spec, driver, shared = mega_spec(), Driver(), torch.zeros(16, dtype=torch.uint8)
    ids, weights = torch.zeros((3, 2), dtype=torch.int64), torch.ones((3, 2))
    out = torch.empty((3, spec.hidden), dtype=torch.bfloat16)
    stash = scratch_bytes(spec, 132, ["prefill"])
    panels = scratch_bytes(spec, 132, ["expanded"])
    assert 0 < stash < panels
    with on_the_host(driver):
        own: Any = MoEContext(spec, None, "sm90", device=CPU, max_tokens_per_rank=64).backend
        experts = own.packed(make_problem(spec).weights)

        def plan_of(max_tokens: int, scratch: torch.Tensor | None, of: MoESpec = spec) -> MegaMoePlan:
            limits, bases = workspace_limits(of, 1, max_tokens), torch.zeros(1, dtype=torch.int64)
            places: dict[str, Any] = dict(rank=0, bases=bases, base=0, record=0, timeout_s=1.0)
            return MegaMoePlan(of, experts, limits, **places, scratch=scratch)

        def launched(plan: MegaMoePlan, name: str) -> Any:
            plan.launch(None, ids, weights, out, 1, instance=INSTANCES[name])
            return driver.launches[-1]

        plan = plan_of(64, shared)
        for name in ("decode", "wide"):
            args = launched(plan, name)
            assert plan.scratch is shared and (args.stash, args.panels, args.panel_slots) == (0, 0, 0)
        args = launched(plan, "prefill")
        assert plan.scratch.numel() == stash and args.stash == plan.scratch.data_ptr()
        assert (args.panels, args.panel_slots, args.panels_ahead) == (0, 0, 0)
        smaller = weakref.ref(plan.scratch)
        args = launched(plan, "expanded")
        assert plan.scratch.numel() == panels and args.panels == plan.scratch.data_ptr()
        assert args.stash == 0 and 0 < args.panels_ahead < args.panel_slots
        gc.collect()
        kept = smaller()
        assert kept is not None and launched(plan, "prefill").stash == kept.data_ptr()

        # a workspace for so many tokens that calls of its plans may expand weights: at once, and shared
        for max_tokens, need in ((600, 0), (601, stash), (2560, stash), (2561, panels)):
            assert plan_of(max_tokens, None).scratch.numel() == need
        first = plan_of(2561, None)
        second = plan_of(2561, first.scratch)
        assert second.scratch is first.scratch
        deeper = dataclasses.replace(spec, hidden=2 * spec.intermediate)
        third = plan_of(2561, first.scratch, deeper)
        assert third.scratch.numel() == scratch_bytes(deeper, 132, ["expanded"]) > panels
        assert launched(first, "expanded").panels == first.scratch.data_ptr() != third.scratch.data_ptr()
        assert launched(third, "expanded").panels == third.scratch.data_ptr()


def test_the_activation_reaches_the_kernel_as_numbers() -> None:
    """h = g / (1 + 2^(steepness g)) (u + shift): the base and what the activation's own numbers make of it."""
    log2_e = 1 / math.log(2)
    for changes, limit, steepness, shift in (
        ({"activation": "silu"}, math.inf, -log2_e, 0.0),
        ({"activation": "swiglu_clamp", "swiglu_limit": 7.0}, 7.0, -log2_e, 0.0),
        ({"activation": "swiglu_oai", "swiglu_limit": 7.0, "swiglu_alpha": 1.702}, 7.0, -1.702 * log2_e, 1.0),
    ):
        spec, driver = mega_spec(**changes), Driver()
        with on_the_host(driver), torch.no_grad():
            own = MoEContext(spec, None, "sm90", device=CPU, max_tokens_per_rank=64)
            mega_moe(*make_tokens(spec, 3, dtype=torch.bfloat16), make_problem(spec).weights, own)
        args = driver.launches[-1]
        assert (args.limit, args.shift) == (limit, shift)
        assert args.steepness == ctypes.c_float(steepness).value


def test_a_call_without_gradient_goes_past_the_dispatcher(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, driver = mega_spec(), Driver()
    seen: list[str] = []
    monkeypatch.setattr("megamoe.functional._mega_moe_op", lambda *_: seen.append("dispatcher"))
    with on_the_host(driver):
        own = MoEContext(spec, None, "sm90", device=CPU, max_tokens_per_rank=64)
        experts, tokens = make_problem(spec).weights, make_tokens(spec, 3, dtype=torch.bfloat16)
        mega_moe(*tokens, experts, own)  # nothing asks for a gradient
        assert seen == [] and len(driver.launches) == 1
        tokens[0].requires_grad_()
        with torch.no_grad():
            mega_moe(*tokens, experts, own)
        assert seen == [] and len(driver.launches) == 2
        mega_moe(*tokens, experts, own)
        assert seen == ["dispatcher"]
        tokens[0].requires_grad_(False)
        with torch.utils._python_dispatch.TorchDispatchMode():
            mega_moe(*tokens, experts, own)
        assert seen == ["dispatcher"] * 2
        torch.func.vmap(lambda x: mega_moe(x, *tokens[1:], experts, own) or x)(tokens[0][None])
        assert seen == ["dispatcher"] * 3 and len(driver.launches) == 2


def test_a_call_like_one_before_takes_the_shortest_way(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, driver = mega_spec(), Driver()
    long_ways: list[int] = []
    run = Sm90Backend._run

    def counted(self: Sm90Backend, x: torch.Tensor, *rest: Any) -> torch.Tensor:
        long_ways.append(len(x))
        return run(self, x, *rest)

    monkeypatch.setattr(Sm90Backend, "_run", counted)
    with on_the_host(driver) as gpu, torch.no_grad():
        own = MoEContext(spec, None, "sm90", device=CPU, max_tokens_per_rank=64)
        experts = local_weights(make_problem(spec), 0, 1)
        backend: Any = own.backend

        def call(count: int, *, long: bool, out: bool = False, dtype: torch.dtype = torch.int64) -> None:
            x, ids, weights = make_tokens(spec, count, dtype=torch.bfloat16)
            ids, given = ids.to(dtype), torch.empty_like(x) if out else None
            long_ways.clear()
            y = mega_moe(x, ids, weights, experts, own, out=given)
            assert long_ways == ([count] if long else []) and (given is None or y is given)
            args = driver.launches[-1]
            assert (args.x, args.ids, args.weights) == tuple(t.data_ptr() for t in (x, ids, weights))
            assert (args.out, args.num_tokens, args.id_bytes) == (y.data_ptr(), count, dtype.itemsize)
            assert (args.received, args.refused) == (0, 0)

        call(3, long=True)
        call(3, long=False)
        call(5, long=True)
        call(3, long=True, out=True)
        for count, out in ((3, False), (3, True), (5, False)):
            call(count, long=False, out=out)
        call(3, long=True, dtype=torch.int32)  # another type
        call(3, long=False, dtype=torch.int32)
        # what another call left in the shared bytes is gone
        x, ids, weights = make_tokens(spec, 3, dtype=torch.bfloat16)
        received = torch.zeros(8, dtype=torch.int32)
        plan = backend._ready(experts).plan
        backend.workspace.launch(plan, x, ids, weights, torch.empty_like(x), received=received, refused=7)
        assert (driver.launches[-1].received, driver.launches[-1].refused) == (received.data_ptr(), 7)
        call(3, long=False, dtype=torch.int32)
        # weights that have changed are packed again first, in place; then all is as before
        address = backend.packed(experts).w13.data.data_ptr()
        experts.w2[1].zero_()
        call(3, long=True, dtype=torch.int32)
        call(3, long=False, dtype=torch.int32)
        assert backend.packed(experts).w13.data.data_ptr() == address == driver.launches[-1].w13
        # other weights
        kept, experts = experts, local_weights(make_problem(spec, seed=1), 0, 1)
        call(5, long=True)
        call(5, long=False)
        experts = kept
        call(5, long=True)
        # another stream must wait for the last call, a capture is another matter, and a failure is told
        gpu.current = 9
        call(3, long=True, dtype=torch.int32)
        assert gpu.ordered == [(1, 9)]
        call(3, long=False, dtype=torch.int32)
        gpu.capture = 1
        call(3, long=True, dtype=torch.int32)
        gpu.capture = 0
        FaultRecord.from_address(backend.workspace._record_memory.data_ptr()).status = 1
        with pytest.raises(MegaMoETimeout):
            call(3, long=False, dtype=torch.int32)
        backend.workspace.reset()
        # more tokens than the workspace holds are one launch, as any other
        call(65, long=True)
        call(65, long=False)
        # checked mode looks at every call
        strict = MoEContext(spec, None, "sm90", device=CPU, max_tokens_per_rank=64, check=True)
        for _ in range(2):
            long_ways.clear()
            mega_moe(*make_tokens(spec, 3, dtype=torch.bfloat16), experts, strict)
            assert long_ways == [3]
        own.close()
        with pytest.raises(MegaMoeError, match="has been closed or was dropped"):
            mega_moe(*make_tokens(spec, 3, dtype=torch.bfloat16), experts, own)
