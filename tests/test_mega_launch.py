"""The mega-kernel's launch without a GPU: the bytes that the driver gets, and what is prepared once."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

pytest.importorskip("megamoe._host", reason="the C++ engine is not built")

from helpers_mega import mega_spec, on_the_host  # noqa: E402
from helpers_moe import local_weights, make_problem, make_tokens  # noqa: E402

import megamoe.kernels.mega_moe as mega_kernel  # noqa: E402
from megamoe.backends.sm90 import Sm90Backend  # noqa: E402
from megamoe.errors import MegaMoeError, MegaMoETimeout  # noqa: E402
from megamoe.functional import MoEContext, mega_moe  # noqa: E402
from megamoe.kernels.mega_moe import INSTANCES, FaultRecord, shape_hash  # noqa: E402

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
        own = MoEContext(spec, None, "sm90", device=CPU, max_tokens_per_rank=64)
        experts = make_problem(spec).weights
        backend: Any = own.backend
        for count, dtype in ((3, torch.int64), (0, torch.int64), (3, torch.int32), (5, torch.int64), (64, torch.int32)):
            x, ids, weights = make_tokens(spec, count, dtype=torch.bfloat16)
            ids, out = ids.to(dtype), torch.empty_like(x)
            assert mega_moe(x, ids, weights, experts, own, out=out) is out
            args = driver.launches[-1]
            given = (args.x, args.ids, args.weights, args.out, args.num_tokens, args.id_bytes, args.received)
            assert given == (*(t.data_ptr() for t in (x, ids, weights, out)), count, dtype.itemsize, 0)
        packed = backend.packed(experts)
        assert (args.w13, args.w2) == (packed.w13.data.data_ptr(), packed.w2.data.data_ptr())
        assert args.shape_hash == shape_hash(spec) and args.rank == 0 and args.num_local_experts == 8
        # few and many tokens of publish and combine tasks: two shapes, each with a map of either ring
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
            assert args.received == 0

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
        backend.workspace.launch(plan, x, ids, weights, torch.empty_like(x), received=received)
        assert driver.launches[-1].received == received.data_ptr()
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
        # more tokens than the workspace holds are two launches, every time
        for _ in range(2):
            before = len(driver.launches)
            mega_moe(*make_tokens(spec, 65, dtype=torch.bfloat16), experts, own)
            assert [args.num_tokens for args in driver.launches[before:]] == [64, 1]
        # the layers of both ways are known to a failure that names what this rank called
        workspace = backend.workspace
        assert workspace._num_calls == 4 and {known for _, known in workspace._calls} == {spec}
        # checked mode looks at every call
        strict = MoEContext(spec, None, "sm90", device=CPU, max_tokens_per_rank=64, check=True)
        for _ in range(2):
            long_ways.clear()
            mega_moe(*make_tokens(spec, 3, dtype=torch.bfloat16), experts, strict)
            assert long_ways == [3]
        own.close()
        with pytest.raises(MegaMoeError, match="has been closed or was dropped"):
            mega_moe(*make_tokens(spec, 3, dtype=torch.bfloat16), experts, own)
