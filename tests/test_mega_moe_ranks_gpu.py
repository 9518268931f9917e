"""The mega-kernel on several ranks: routing cases against one rank with all experts, failures and what follows them.

The bits of a token depend neither on the other tokens nor on how many ranks share the experts, so every result is
compared bit by bit with that of one rank, and once a case with the oracle. Ranks share GPU 0 where there are fewer GPUs
than ranks; processes are expensive to start, so one set of them runs many cases.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers_dist import run_ranks
from helpers_mega import Tokens, gpu_problem, gpu_tokens, launch, same_bits
from helpers_moe import Problem, check, local_weights
from helpers_mps import own_mps

from megamoe.comm.collectives import Collectives
from megamoe.comm.groups import resolve_group
from megamoe.config import MoESpec
from megamoe.device_workspace import DeviceWorkspace
from megamoe.errors import ConfigError, MegaMoeError, MegaMoETimeout
from megamoe.functional import MoEContext, mega_moe
from megamoe.kernels.mega_moe import INSTANCES

pytestmark = pytest.mark.gpu

SHARED = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
SPEC = MoESpec(
    hidden=512, intermediate=320, num_experts=32, top_k=4, weight_format="mxfp4", act_scale="token", activation="silu"
)
OTHER = MoESpec(
    hidden=1024,
    intermediate=256,
    num_experts=16,
    top_k=2,
    weight_format="mxfp4",
    act_scale="block128",
    activation="swiglu_oai",
    swiglu_limit=7.0,
    swiglu_alpha=1.702,
    expert_bias=True,
    weight_position="before",
)
QWEN3 = MoESpec(hidden=1024, intermediate=384, num_experts=128, top_k=8, weight_format="mxfp4", act_scale="token")


class Ranks:
    """One rank's view of a layer: on the group, and alone with all experts."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        spec: MoESpec,
        shared: DeviceWorkspace,
        *,
        seed: int = 0,
        check: bool = False,
        overflow: str = "chunk",
    ) -> None:
        device, bound = shared.collectives.device, shared.max_tokens_per_rank
        options: dict[str, Any] = {"device": device, "max_tokens_per_rank": bound}
        self.problem: Problem = gpu_problem(spec, seed)
        self.spec, self.rank = spec, rank
        self.local = local_weights(self.problem, rank, world_size)
        timeout_s = shared.collectives.timeout_s
        self.own = MoEContext(
            spec,
            dist.group.WORLD,
            "sm90",
            workspace=shared,
            timeout_s=timeout_s,
            check=check,
            overflow=overflow,
            **options,
        )
        self.alone = MoEContext(spec, None, "sm90", **options)
        self.wrong = torch.zeros((), dtype=torch.int64, device=device)

    def run(self, tokens: Tokens, instance: str | None = None) -> torch.Tensor:
        """Run the group's call, and count the elements that differ from one rank's answer; waits for nothing."""
        y = launch(self.own, tokens, self.local, instance)
        expected = launch(self.alone, tokens, self.problem.weights)
        self.wrong += (y.view(torch.int16) != expected.view(torch.int16)).sum()
        return y

    def settle(self, case: str) -> str:
        """Wait, and fail if any call since the last time was wrong."""
        torch.cuda.synchronize()
        self.own.backend.workspace.check()  # type: ignore[attr-defined]
        wrong = int(self.wrong)
        assert wrong == 0, f"{case}: {wrong} elements differ from one rank's"
        return case


def start(
    rank: int, world_size: int, specs: list[MoESpec], bound: int, *, comm: str = "auto", timeout_s: float = 60.0
) -> DeviceWorkspace:
    os.environ[SHARED] = "1"
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    collectives = Collectives(resolve_group(dist.group.WORLD), device, timeout_s)
    # so that the CTAs of all ranks fit side by side on a GPU that they share
    num_sms = None if torch.cuda.device_count() >= world_size else 132 // world_size
    return DeviceWorkspace(specs, collectives, max_tokens_per_rank=bound, comm=comm, num_sms=num_sms)


def run_routing(rank: int, world_size: int, comm: str) -> list[str]:
    shared = start(rank, world_size, [SPEC, OTHER, QWEN3], 512, comm=comm)
    done = []
    layer = Ranks(rank, world_size, SPEC, shared)

    # C5 (a): a rank that comes late
    if rank == 1:
        time.sleep(3)
    tokens = gpu_tokens(SPEC, 100 + rank, seed=rank)
    check(layer.problem, layer.run(tokens), *tokens)
    done.append(layer.settle("late rank"))

    # C1: everything to the experts of the last rank, then all tokens to the same experts, then balanced again
    per_rank = SPEC.num_experts // world_size
    first = SPEC.num_experts - per_rank
    tokens = gpu_tokens(SPEC, 512, seed=10 + rank)
    hot = (tokens[0], tokens[1] % per_rank + first, tokens[2])
    same = (tokens[0], torch.arange(first, first + 4, device="cuda").expand(512, 4).contiguous(), tokens[2])
    for call in range(50):
        y = layer.run(hot if call % 2 else same)
    check(layer.problem, y, *hot)
    check(layer.problem, layer.run(tokens), *tokens)
    done.append(layer.settle("hot rank"))

    # C2: ranks without tokens, in turn, without a wait; and a rank that gets no rows
    counts = [0, 512, 1, 7][:world_size]
    for call in range(8):
        count = counts[(rank + call) % world_size]
        tokens = gpu_tokens(SPEC, count, seed=20 + rank + call)
        assert layer.run(tokens).shape == (count, SPEC.hidden)
    tokens = gpu_tokens(SPEC, 60, seed=30 + rank)
    layer.run((tokens[0], tokens[1] % per_rank, tokens[2]))
    layer.run((tokens[0], torch.full_like(tokens[1], -1), torch.full_like(tokens[2], float("nan"))))
    done.append(layer.settle("empty ranks"))

    # C3: ids
    wide = Ranks(rank, world_size, QWEN3, shared, seed=1)
    x, ids, weights = gpu_tokens(QWEN3, 257, seed=rank)
    ids[(torch.rand(ids.shape, generator=torch.Generator().manual_seed(rank)) < 0.3).cuda()] = -1
    ids[::10] = -1
    ids[5] = torch.tensor([5, 5, 5, 5, 9, 9, -1, 0])
    weights[ids == -1] = float("nan")
    y = wide.run((x, ids, weights))
    assert not bool(y[::10].any())
    check(wide.problem, y, x, ids, weights)
    assert same_bits(y, wide.run((x, ids.int(), weights)))
    done.append(wide.settle("ids"))
    strict = Ranks(rank, world_size, QWEN3, shared, seed=1, check=True)
    beyond = ids.clone()
    if rank == 0:
        beyond[1, 2] = QWEN3.num_experts
    with pytest.raises(MegaMoeError, match="topk_ids: rank 0 has 1 ids above the last expert; valid are 0 to 127"):
        mega_moe(x, beyond, weights, strict.local, strict.own)
    assert same_bits(mega_moe(x, ids, weights, strict.local, strict.own), y)
    done.append(strict.settle("checked ids"))

    # C20: two layers in turn, unequal counts
    other = Ranks(rank, world_size, OTHER, shared, seed=2)
    batches = [gpu_tokens(SPEC, 40 + 30 * rank, seed=rank), gpu_tokens(OTHER, 300 - 70 * rank, seed=rank)]
    for call in range(100):
        (layer, other)[call % 2].run(batches[call % 2])
    done += [layer.settle("two layers"), other.settle("two layers")]

    # random counts and skew
    generator = torch.Generator().manual_seed(rank)
    pool = gpu_tokens(SPEC, 512, seed=40 + rank)
    kinds = (pool[1], pool[1] % 5, pool[1].clamp(min=20), torch.where(pool[1] < 16, -1, pool[1]))
    for _ in range(60):
        count, kind = (int(torch.randint(n, (), generator=generator)) for n in (513, len(kinds)))
        layer.run((pool[0][:count], kinds[kind][:count], pool[2][:count]))
    done.append(layer.settle("random"))

    # every instance, on all ranks and then another one on each: they move rows in different ways
    names = list(INSTANCES)
    for call in range(2 * len(names)):
        tokens = gpu_tokens(SPEC, 290 + 13 * rank, seed=60 + rank + call)
        layer.run(tokens, names[(call // 2 + call % 2 * rank) % len(names)])
    done.append(layer.settle("instances"))

    # C6: replays of a graph
    static = gpu_tokens(SPEC, 64, seed=rank)
    launch(layer.own, static, layer.local)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = mega_moe(*static, layer.local, layer.own)
    for replay in range(12):
        tokens = gpu_tokens(SPEC, 64, seed=50 + rank + 7 * replay)
        if replay % 3 == 1:
            tokens[1][30:] = -1
        for target, source in zip(static, tokens, strict=True):
            target.copy_(source)
        graph.replay()
        expected = launch(layer.alone, tokens, layer.problem.weights)
        layer.wrong += (y.view(torch.int16) != expected.view(torch.int16)).sum()
    done.append(layer.settle("graph"))
    del graph
    if comm == "nvshmem":
        from megamoe.comm.nvshmem import finalize

        shared.close()
        finalize(shared.collectives)
    return done


CASES = [
    "late rank",
    "hot rank",
    "empty ranks",
    "ids",
    "checked ids",
    *["two layers"] * 2,
    "random",
    "instances",
    "graph",
]


@pytest.mark.parametrize(("comm", "world_size"), [("symm_mem", 2), ("symm_mem", 4), ("nvshmem", 2)])
def test_routing(comm: str, world_size: int) -> None:
    if comm == "nvshmem":
        pytest.importorskip("nvshmem.core")
    for done in run_ranks(world_size, "test_mega_moe_ranks_gpu:run_routing", comm, timeout_s=110):
        assert done == CASES


@pytest.mark.parametrize("world_size", [2, 4])
def test_routing_under_mps(world_size: int) -> None:
    """Elsewhere ranks that share a GPU take turns on it; here their kernels run side by side."""
    with own_mps() as variables:
        job = "test_mega_moe_ranks_gpu:run_routing"
        for done in run_ranks(world_size, job, "symm_mem", timeout_s=110, environment=variables):
            assert done == CASES


def run_graphs(rank: int, world_size: int, comm: str) -> int:
    """Capture two layers in one graph; return how many replays were compared with eager calls of the same inputs."""
    shared = start(rank, world_size, [SPEC, OTHER], 256, comm=comm)
    layers = [Ranks(rank, world_size, spec, shared, seed=seed) for seed, spec in enumerate((SPEC, OTHER))]
    counts = [200 - 60 * (rank % 2), 40 + rank]  # another number of tokens on every rank, and for every layer
    inputs = []
    for number in range(10):
        pair = []
        for layer, count in zip(layers, counts, strict=True):
            tokens = gpu_tokens(layer.spec, count, seed=100 * rank + number)
            if number % 3 == 1:  # all to the first rank
                tokens[1].remainder_(layer.spec.num_experts // world_size)
            if number % 3 == 2:
                tokens[1][count // 2 :] = -1
            pair.append(tokens)
        inputs.append(pair)
    eager = [[launch(layer.own, t, layer.local) for layer, t in zip(layers, pair, strict=True)] for pair in inputs]
    static = [tuple(t.clone() for t in tokens) for tokens in inputs[0]]
    torch.cuda.synchronize()
    shared.check()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = [mega_moe(*tokens, layer.local, layer.own) for layer, tokens in zip(layers, static, strict=True)]

    # replays behind each other, inputs and outputs copied on the device, no word from the host in between
    replayed = [[torch.full_like(y, float("nan")) for y in outputs] for _ in range(2 * len(inputs))]
    for number, kept in enumerate(replayed):
        for own, given in zip(static, inputs[number % len(inputs)], strict=True):
            for target, source in zip(own, given, strict=True):
                target.copy_(source)
        graph.replay()
        for target, source in zip(kept, outputs, strict=True):
            target.copy_(source)
        if number == len(inputs):  # an eager call among them
            again = launch(layers[0].own, inputs[3][0], layers[0].local)
    torch.cuda.synchronize()
    shared.check()
    for number, kept in enumerate(replayed):
        for y, expected in zip(kept, eager[number % len(inputs)], strict=True):
            assert same_bits(y, expected), f"replay {number} differs from the eager call of its inputs"
    assert same_bits(again, eager[3][0])
    del graph
    if comm == "nvshmem":
        from megamoe.comm.nvshmem import finalize

        shared.close()
        finalize(shared.collectives)
    return len(replayed)


@pytest.mark.parametrize(("comm", "world_size"), [("symm_mem", 2), ("symm_mem", 4), ("nvshmem", 2)])
def test_graphs_replay_what_eager_calls_give(comm: str, world_size: int) -> None:
    if comm == "nvshmem":
        pytest.importorskip("nvshmem.core")
    assert run_ranks(world_size, "test_mega_moe_ranks_gpu:run_graphs", comm, timeout_s=110) == [20] * world_size


def run_chunks(rank: int, world_size: int, arguments: Any) -> list[str]:
    """C4: ranks whose calls have different numbers of chunks, against one rank that holds everything at once."""
    shared = start(rank, world_size, [SPEC, OTHER], 64)
    done = []
    layer = Ranks(rank, world_size, SPEC, shared)
    layer.alone = MoEContext(SPEC, None, "sm90", device=shared.collectives.device, max_tokens_per_rank=1024)
    other = Ranks(rank, world_size, OTHER, shared, seed=2)

    # counts of the first two ranks, then of the others
    cases = ((200, 5), (64, 65), (0, 300), (131, 131), (1, 0), (65, 64), (1000, 0), (0, 0))
    for call, counts in enumerate(cases * 2):
        tokens = gpu_tokens(SPEC, counts[rank] if rank < 2 else 70 * rank, seed=100 * call + rank)
        if call % 3 == 1:
            tokens[1].clamp_(min=20)
        layer.run(tokens)
    done.append(layer.settle("chunks"))

    generator = torch.Generator().manual_seed(rank)
    pool = gpu_tokens(SPEC, 400, seed=40 + rank)
    small = gpu_tokens(OTHER, 60, seed=rank)
    for call in range(60):
        count = int(torch.randint(401, (), generator=generator)) if call % 2 else 30
        layer.run((pool[0][:count], pool[1][:count], pool[2][:count]))
        if call % 5 == 0:
            other.run(small)
    done += [layer.settle("random chunks"), other.settle("a layer in between")]

    static = gpu_tokens(SPEC, 150 if rank == 0 else 20, seed=rank)
    mega_moe(*static, layer.local, layer.own)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = mega_moe(*static, layer.local, layer.own)
    for replay in range(6):
        tokens = gpu_tokens(SPEC, len(static[0]), seed=50 + rank + 7 * replay)
        for target, source in zip(static, tokens, strict=True):
            target.copy_(source)
        graph.replay()
        expected = launch(layer.alone, tokens, layer.problem.weights)
        layer.wrong += (y.view(torch.int16) != expected.view(torch.int16)).sum()
        layer.run(gpu_tokens(SPEC, 10, seed=replay))
    done.append(layer.settle("graph of chunks"))
    return done


CHUNK_CASES = ["chunks", "random chunks", "a layer in between", "graph of chunks"]


@pytest.mark.parametrize("world_size", [2, 4])
def test_chunks(world_size: int) -> None:
    for done in run_ranks(world_size, "test_mega_moe_ranks_gpu:run_chunks", timeout_s=100):
        assert done == CHUNK_CASES


def message_of(call: Callable[[], Any], error: type[Exception]) -> str:
    with pytest.raises(error) as caught:
        call()
    return str(caught.value)


def run_failures(rank: int, world_size: int, arguments: Any) -> dict[str, str]:
    found: dict[str, str] = {}
    # C4: unequal bounds
    found["bounds"] = message_of(lambda: start(rank, world_size, [SPEC], 64 if rank else 128), ConfigError)
    shared = start(rank, world_size, [SPEC, OTHER], 64, timeout_s=4.0)
    layer, other = Ranks(rank, world_size, SPEC, shared), Ranks(rank, world_size, OTHER, shared, seed=2)
    tokens = gpu_tokens(SPEC, 50 + rank, seed=rank)
    layer.run(tokens)
    layer.settle("before")

    # C4: too many tokens on one rank, where chunks are not wanted
    many = gpu_tokens(SPEC, 65 if rank == 0 else 16)
    strict = Ranks(rank, world_size, SPEC, shared, overflow="error")
    if rank == 0:
        found["overflow"] = message_of(lambda: mega_moe(*many, strict.local, strict.own), ConfigError)
    else:
        y = launch(strict.own, many, strict.local, fill=0.0)
        torch.cuda.synchronize()
        assert bool(y.isnan().all())
        found["overflow of a rank"] = message_of(shared.check, MegaMoeError)
    torch.cuda.synchronize()
    shared.check()
    strict.run(tokens)
    strict.settle("after too many tokens")
    strict = Ranks(rank, world_size, SPEC, shared, check=True, overflow="error")
    found["checked overflow"] = message_of(lambda: mega_moe(*many, strict.local, strict.own), ConfigError)
    layer.run(tokens)
    layer.settle("after too many tokens")

    # C5 (b): the last rank never calls
    missing = world_size - 1
    if rank != missing:
        started = time.monotonic()
        y = launch(layer.own, tokens, layer.local, fill=0.0)
        torch.cuda.synchronize()
        assert time.monotonic() - started < 15 and bool(y.isnan().all())
        found["timeout"] = message_of(shared.check, MegaMoETimeout)
        assert message_of(lambda: launch(layer.own, tokens, layer.local), MegaMoETimeout) == found["timeout"]
    dist.barrier()
    shared.reset()
    for _ in range(3):
        layer.run(tokens)
    layer.settle("after a timeout")

    # ranks that call different layers
    dist.barrier()
    mine = other if rank == missing else layer
    y = launch(mine.own, gpu_tokens(mine.spec, 20), mine.local, fill=0.0)
    torch.cuda.synchronize()
    assert bool(y.isnan().all())
    found["layers"] = message_of(shared.check, MegaMoeError)
    dist.barrier()
    shared.reset()
    other.run(gpu_tokens(OTHER, 64, seed=rank))
    layer.run(tokens)
    layer.settle("after different layers")
    other.settle("after different layers")
    return found


@pytest.mark.parametrize("world_size", [2, 4])
def test_failures(world_size: int) -> None:
    results = run_ranks(world_size, "test_mega_moe_ranks_gpu:run_failures", timeout_s=100)
    missing = f"rank {world_size - 1}"
    for rank, found in enumerate(results):
        assert "got 128 tokens on rank 0 and 64 on rank 1" in found["bounds"]
        assert "rank 0 brought 65 tokens, the bound is 64" in found["checked overflow"]
        assert rank == 0 or "rank 0 brought 65 tokens, the bound is 64" in found["overflow of a rank"]
        assert "called different layers" in found["layers"] and "workspace.reset()" in found["layers"]
        if rank != world_size - 1:
            assert f"waited for {missing}, which" in found["timeout"] or f"because {missing} did" in found["timeout"]
    assert "rank 0 brought 65 tokens, the bound is 64; raise it or set" in results[0]["overflow"]
    # whoever saw it first names the numbers of both
    assert any("hidden 512" in found["layers"] and "hidden 1024" in found["layers"] for found in results)
