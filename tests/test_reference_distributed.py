"""The reference backend on 2, 4 and 8 ranks: against the oracle, with uneven and empty ranks, and when things go wrong.

The ranks of one world size run in one job, because starting processes is most of the time; each test reads its part.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers_dist import run_ranks
from helpers_moe import GRID, Problem, check, local_weights, make_problem, make_tokens
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from megamoe.comm import collectives
from megamoe.comm.collectives import Collectives, pack_rows, unpack_rows
from megamoe.comm.groups import resolve_group
from megamoe.config import MoEConfig, MoESpec
from megamoe.errors import ConfigError, MegaMoeError, MegaMoETimeout
from megamoe.functional import MoEContext, mega_moe
from megamoe.layers.moe import MoELayer

SMALL = MoESpec(hidden=32, intermediate=32, num_experts=8, top_k=2)
FLASH_16 = MoESpec(hidden=256, intermediate=128, num_experts=256, top_k=6, activation="swiglu_clamp", swiglu_limit=10.0)
QWEN3_16 = MoESpec(hidden=256, intermediate=96, num_experts=128, top_k=8, weight_format="mxfp4")
# uneven, and one rank without tokens
GRID_TOKENS = {2: (37, 5), 4: (7, 0, 20, 1)}
C2_TOKENS = (0, 512, 1, 7)
C2_SPEC = MoESpec(hidden=256, intermediate=128, num_experts=32, top_k=6, weight_format="mxfp4")


def outcome(call: Callable[[], Any]) -> str:
    """Return what a call raises, as `Type: message`, or "ok"."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "ok"


def share(tensor: Tensor, counts: tuple[int, ...], rank: int) -> Tensor:
    return tensor.split(list(counts))[rank]


def run_op(
    problem: Problem, tokens: tuple[Tensor, Tensor, Tensor], counts: tuple[int, ...], rank: int, **options: Any
) -> Tensor:
    """Run this rank's share of a batch on the default group; the result goes into memory full of NaN."""
    group = options.pop("group", dist.group.WORLD)
    context = MoEContext(problem.spec, group, "reference", device="cpu", timeout_s=60, **options)
    x, ids, weights = (share(t, counts, rank) for t in tokens)
    out = torch.full_like(x, float("nan"))
    return mega_moe(x, ids, weights, local_weights(problem, rank, len(counts)), context, out=out)


def run_grid(rank: int, world_size: int) -> dict[str, Tensor]:
    counts = GRID_TOKENS[world_size]
    results = {}
    for name, case in GRID.items():
        problem = make_problem(case.spec, dtype=case.dtype)
        results[name] = run_op(problem, make_tokens(case.spec, sum(counts), dtype=case.dtype), counts, rank)
    return results


# ---- two ranks ------------------------------------------------------------------------------------------------------


def c3_tokens() -> tuple[Tensor, Tensor, Tensor]:
    x, ids, weights = make_tokens(QWEN3_16, 257)
    chance = torch.rand(257, 9, generator=torch.Generator().manual_seed(7))
    ids[chance[:, :8] < 0.3] = -1
    ids[chance[:, 8] < 0.1] = -1
    ids[100] = torch.tensor([5, 5, 5, 5, 9, 9, -1, 0])
    return x, ids, weights.masked_fill(ids < 0, float("nan"))


def rank_of_two(rank: int, world_size: int, _: Any) -> dict[str, Any]:
    results: dict[str, Any] = {"grid": run_grid(rank, world_size)}
    problem, (x, ids, weights) = make_problem(QWEN3_16), c3_tokens()
    counts = (100, 157)
    results["c3"] = run_op(problem, (x, ids, weights), counts, rank)
    results["c3 int32"] = run_op(problem, (x, ids.int(), weights), counts, rank)
    wrong = ids.clone()
    wrong[200, 3] = QWEN3_16.num_experts
    results["c3 checked"] = outcome(lambda: run_op(problem, (x, wrong, weights), counts, rank, check=True))
    results["c3 unchecked"] = run_op(problem, (x, wrong, weights), counts, rank)
    return results


@cache
def two_ranks() -> list[dict[str, Any]]:
    return run_ranks(2, "test_reference_distributed:rank_of_two", timeout_s=240)


@pytest.mark.parametrize("name", GRID)
def test_two_ranks_equal_the_oracle(name: str) -> None:
    case, counts = GRID[name], GRID_TOKENS[2]
    problem = make_problem(case.spec, dtype=case.dtype)
    y = torch.cat([rank["grid"][name] for rank in two_ranks()])
    check(problem, y, *make_tokens(case.spec, sum(counts), dtype=case.dtype))


def test_c3_ids_on_two_ranks() -> None:
    problem, (x, ids, weights) = make_problem(QWEN3_16), c3_tokens()
    y = torch.cat([rank["c3"] for rank in two_ranks()])
    check(problem, y, x, ids, weights)
    assert torch.count_nonzero(y[(ids < 0).all(1)]) == 0
    assert torch.equal(y, torch.cat([rank["c3 int32"] for rank in two_ranks()]))
    # the wrong id is on rank 1; both ranks say the same, and neither waits for the other
    for rank in two_ranks():
        assert rank["c3 checked"] == (
            "MegaMoeError: topk_ids: rank 1 has 1 ids above the last expert, the largest is 128; "
            "valid are 0 to 127, or -1 for no expert"
        )
    dropped = ids.clone()
    dropped[200, 3] = -1
    check(problem, torch.cat([rank["c3 unchecked"] for rank in two_ranks()]), x, dropped, weights)


# ---- four ranks -----------------------------------------------------------------------------------------------------


def c1_tokens(seed: int, *, hot: bool) -> tuple[Tensor, Tensor, Tensor]:
    x, ids, weights = make_tokens(FLASH_16, 4 * 512, seed=seed)
    return x, torch.arange(250, 256).expand(4 * 512, 6).contiguous() if hot else ids, weights


def run_c1(rank: int) -> dict[str, Any]:
    """50 calls in which rank 3 owns every chosen expert, then a balanced one, all on one context."""
    problem = make_problem(FLASH_16)
    local = local_weights(problem, rank, 4)
    context = MoEContext(FLASH_16, dist.group.WORLD, "reference", device="cpu", timeout_s=60, check=True)
    hot, balanced = ([share(t, (512,) * 4, rank) for t in c1_tokens(0, hot=h)] for h in (True, False))
    first = mega_moe(*hot, local, context)
    same = all(torch.equal(first, mega_moe(*hot, local, context)) for _ in range(49))
    return {"hot": first, "same": same, "balanced": mega_moe(*balanced, local, context)}


def c2_counts(turn: int) -> tuple[int, ...]:
    return C2_TOKENS[turn % 4 :] + C2_TOKENS[: turn % 4]


def c2_tokens(turn: int) -> tuple[Tensor, Tensor, Tensor]:
    x, ids, weights = make_tokens(C2_SPEC, sum(C2_TOKENS), seed=turn)
    # the experts of rank `turn` receive nothing, though the rank may own most of the tokens
    first = turn % 4 * 8
    ids = torch.where((ids >= first) & (ids < first + 8), (ids + 8) % 32, ids)
    return x, ids, weights


def run_c2(rank: int) -> list[Tensor]:
    local = local_weights(make_problem(C2_SPEC), rank, 4)
    context = MoEContext(C2_SPEC, dist.group.WORLD, "reference", device="cpu", timeout_s=60)
    results = []
    for turn in range(8):
        tokens = (share(t, c2_counts(turn), rank) for t in c2_tokens(turn))
        results.append(mega_moe(*tokens, local, context))
    return results


def run_subsets(rank: int) -> dict[str, Any]:
    """Groups that are not the world: a subset, a dimension of a mesh, blocks of consecutive ranks."""
    problem, tokens = make_problem(SMALL), make_tokens(SMALL, 14)
    pair = dist.new_group([1, 3])
    results: dict[str, Any] = {}
    if rank in (1, 3):
        results["pair"] = run_op(problem, tokens, (5, 9), rank // 2, group=pair)
    else:
        # rank 0 and 2 got the placeholder of non-members
        results["refused"] = outcome(lambda: MoEContext(SMALL, pair, "reference", device="cpu"))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    results["mesh"] = run_op(problem, tokens, (5, 9), rank % 2, group=mesh)
    unnamed = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    results["mesh refused"] = outcome(lambda: MoEContext(SMALL, unnamed, "reference", device="cpu"))
    results["no tokens"] = run_op(problem, tuple(t[:0] for t in tokens), (0, 0, 0, 0), rank)

    config = {
        "model": {"hidden": 32, "intermediate": 32, "num_experts": 8, "top_k": 2, "dtype": "float32"},
        "router": {"score": "softmax"},
        "parallel": {"expert_parallel_size": 2, "timeout_s": 60},
    }
    layer = MoELayer(MoEConfig.from_dict(config))
    assert layer.context is not None
    results["block"] = (layer.context.rank, layer.context.group.global_ranks)
    return results


def run_refusals(rank: int) -> dict[str, str]:
    """What must be refused alike on all ranks; after each the group still works."""
    problem, world = make_problem(SMALL), dist.group.WORLD
    tokens = make_tokens(SMALL, 30)

    def context(spec: MoESpec = SMALL, **options: Any) -> MoEContext:
        settings = {"device": "cpu", "timeout_s": 60, **options}
        return MoEContext(spec, world, settings.pop("backend", "reference"), **settings)

    results = {
        "bounds": outcome(lambda: context(max_tokens_per_rank=1024 if rank == 0 else 2048)),
        "one backend": outcome(lambda: context(backend="sm90" if rank == 2 else "reference")),
        "no backend": outcome(lambda: context(backend="sm90")),
        "experts": outcome(lambda: context(MoESpec(hidden=32, intermediate=32, num_experts=10, top_k=2))),
        "formats": outcome(
            lambda: context(MoESpec(hidden=32 if rank else 64, intermediate=32, num_experts=8, top_k=2))
        ),
        "overflow": outcome(
            lambda: run_op(problem, tokens, (3, 20, 7, 0), rank, max_tokens_per_rank=16, overflow="error")
        ),
        "dtypes": outcome(
            lambda: run_op(
                problem, (tokens[0].to([torch.float32, torch.bfloat16][rank == 3]), *tokens[1:]), (30, 0, 0, 0), rank
            )
        ),
    }
    # one rank makes a call more than the others: the next collective call tells, instead of mixing two calls
    ahead = context(check=True)
    ahead.backend._call += rank == 1  # type: ignore[attr-defined]
    local = local_weights(problem, rank, 4)
    results["order"] = outcome(lambda: mega_moe(*(t[:1] for t in tokens), local, ahead))
    layer_config = {
        "model": {"hidden": 32, "intermediate": 32, "num_experts": 10, "top_k": 2},
        "router": {"score": "softmax"},
    }
    results["layer"] = outcome(lambda: MoELayer(MoEConfig.from_dict(layer_config), world))
    results["after"] = outcome(lambda: run_op(problem, tokens, (3, 20, 7, 0), rank))
    return results


def run_collectives(rank: int) -> dict[str, Any]:
    """Every exchange on its own; on both transports, and with messages cut into small pieces."""
    ranks = resolve_group(dist.group.WORLD)
    results: dict[str, Any] = {}
    for kind in ("whole", "pieces", "torch"):
        exchange = Collectives(ranks, torch.device("cpu"), 60)
        exchange._point_to_point = kind != "torch"
        collectives._PIECE_BYTES = 7 if kind == "pieces" else 1 << 30
        sent, counts = a2a_rows(rank), A2A_COUNTS
        received = [counts[source][rank] for source in range(4)]
        packed = exchange.all_to_all(pack_rows(*sent), counts[rank], received, phase="test")
        results[kind] = {
            "rows": unpack_rows(packed, sent),
            "gathered": exchange.all_gather(torch.full((rank, 3), float(rank)), [0, 1, 2, 3], phase="test"),
            "sum": exchange.all_reduce(torch.arange(7.0) * 0.1 + rank, phase="test"),
            "objects": exchange.gather_objects({"rank": rank, "text": "x" * rank}, phase="test"),
        }
    collectives._PIECE_BYTES = 1 << 30
    return results


# rows from (row) to (column); rank 3 sends nothing, rank 1 gets nothing from others
A2A_COUNTS = [[2, 0, 5, 1], [3, 1, 0, 0], [1, 0, 0, 4], [0, 0, 0, 0]]


def a2a_rows(rank: int) -> tuple[Tensor, Tensor, Tensor]:
    total = sum(A2A_COUNTS[rank])
    values = torch.arange(total) + 10 * rank
    wide = values[:, None] + torch.arange(5) / 8
    return wide.bfloat16(), values.float() / 3, wide.to(torch.float8_e4m3fn)


def rank_of_four(rank: int, world_size: int, _: Any) -> dict[str, Any]:
    return {
        "grid": run_grid(rank, world_size),
        "c1": run_c1(rank),
        "c2": run_c2(rank),
        "subsets": run_subsets(rank),
        "refusals": run_refusals(rank),
        "collectives": run_collectives(rank),
    }


@cache
def four_ranks() -> list[dict[str, Any]]:
    return run_ranks(4, "test_reference_distributed:rank_of_four", timeout_s=280)


@pytest.mark.parametrize("name", GRID)
def test_four_ranks_equal_the_oracle(name: str) -> None:
    case, counts = GRID[name], GRID_TOKENS[4]
    problem = make_problem(case.spec, dtype=case.dtype)
    shares = [rank["grid"][name] for rank in four_ranks()]
    assert [len(y) for y in shares] == list(counts)
    check(problem, torch.cat(shares), *make_tokens(case.spec, sum(counts), dtype=case.dtype))


@pytest.mark.parametrize("load", ["hot", "balanced"])
def test_c1_hot_rank(load: str) -> None:
    ranks = [rank["c1"] for rank in four_ranks()]
    assert all(rank["same"] for rank in ranks), "50 equal calls gave different bits"
    check(make_problem(FLASH_16), torch.cat([rank[load] for rank in ranks]), *c1_tokens(0, hot=load == "hot"))


@pytest.mark.parametrize("turn", range(8))
def test_c2_empty_ranks(turn: int) -> None:
    shares = [rank["c2"][turn] for rank in four_ranks()]
    assert [list(y.shape) for y in shares] == [[tokens, 256] for tokens in c2_counts(turn)]
    check(make_problem(C2_SPEC), torch.cat(shares), *c2_tokens(turn))


def test_groups_that_are_not_the_world() -> None:
    problem, tokens = make_problem(SMALL), make_tokens(SMALL, 14)
    ranks = [rank["subsets"] for rank in four_ranks()]
    check(problem, torch.cat([ranks[1]["pair"], ranks[3]["pair"]]), *tokens)
    for first in (0, 2):
        check(problem, torch.cat([ranks[first]["mesh"], ranks[first + 1]["mesh"]]), *tokens)
        assert "not one of its ranks" in ranks[first]["refused"]
    for rank, results in enumerate(ranks):
        assert results["mesh refused"] == (
            "ConfigError: group: a device mesh needs one dimension, or one called 'ep', got dp, tp; pass mesh['<name>']"
        )
        assert list(results["no tokens"].shape) == [0, 32]
        assert results["block"] == (rank % 2, (rank // 2 * 2, rank // 2 * 2 + 1))


@pytest.mark.parametrize("kind", ["whole", "pieces", "torch"])
def test_collectives(kind: str) -> None:
    for rank, results in enumerate(four["collectives"][kind] for four in four_ranks()):
        for column in range(3):
            parts = []
            for source in range(4):
                first = sum(A2A_COUNTS[source][:rank])
                parts.append(a2a_rows(source)[column][first : first + A2A_COUNTS[source][rank]].float())
            received = results["rows"][column]
            assert received.dtype == a2a_rows(0)[column].dtype and torch.equal(received.float(), torch.cat(parts))
        assert results["gathered"].tolist() == [[1.0] * 3] + [[2.0] * 3] * 2 + [[3.0] * 3] * 3
        total = torch.arange(7.0) * 0.1
        for other in range(1, 4):
            total = total + (torch.arange(7.0) * 0.1 + other)
        assert torch.equal(results["sum"], total), "the sum must be in rank order"
        assert results["objects"] == [{"rank": r, "text": "x" * r} for r in range(4)]


REFUSALS = {
    # unequal bounds raise at construction, showing both
    "bounds": (
        "ConfigError: parallel.max_tokens_per_rank must be the same on every rank, got 1024 on rank 0 "
        "and 2048 on rank 1"
    ),
    "one backend": "BackendUnavailable: rank 2: kernel.backend: sm90 cannot run here: ",
    "no backend": "BackendUnavailable: kernel.backend: sm90 cannot run here: ",
    "experts": "ConfigError: num_experts=10 is not divisible by world_size=4; valid sizes are 1, 2, 5, 10",
    "formats": "ConfigError: MoESpec.hidden must be the same on every rank, got 64 on rank 0 and 32 on rank 1",
    "overflow": (
        "MegaMoeError: parallel.max_tokens_per_rank: rank 1 brought 20 tokens, the bound is 16; raise it or set "
        "parallel.overflow: chunk"
    ),
    "dtypes": "MegaMoeError: exchange of counts: rank 0 and rank 3 are not in the same call: ",
    "order": "MegaMoeError: exchange of counts: the ranks are in calls number [1, 2, 1, 1]; ",
    "layer": "ConfigError: parallel.expert_parallel_size is 1 and the group has 4 ranks; make them equal",
    "after": "ok",
}


@pytest.mark.parametrize("name", REFUSALS)
def test_every_rank_is_refused_with_the_same_sentence(name: str) -> None:
    messages = [rank["refusals"][name] for rank in four_ranks()]
    assert messages == messages[:1] * 4
    assert messages[0].startswith(REFUSALS[name]) and "\n" not in messages[0], messages[0]


# ---- eight ranks ----------------------------------------------------------------------------------------------------

C14_WIDE = MoESpec(hidden=64, intermediate=32, num_experts=896, top_k=16, weight_format="fp8_block")


def rank_of_eight(rank: int, world_size: int, _: Any) -> Tensor:
    return run_op(make_problem(C14_WIDE), make_tokens(C14_WIDE, 36), tuple(range(1, 9)), rank)


@pytest.mark.slow
def test_c14_896_experts_top_16_on_eight_ranks() -> None:
    shares = run_ranks(8, "test_reference_distributed:rank_of_eight", timeout_s=200)
    check(make_problem(C14_WIDE), torch.cat(shares), *make_tokens(C14_WIDE, 36))


# ---- lost ranks -----------------------------------------------------------------------------------------------------


def rank_that_may_be_left(rank: int, world_size: int, _: Any) -> dict[str, Any]:
    """First rank 2 never calls, then it dies inside a loop; the others must be told by name, in time."""
    problem = make_problem(MoESpec(hidden=32, intermediate=32, num_experts=6, top_k=2))
    local = local_weights(problem, rank, 3)
    tokens = make_tokens(problem.spec, 4)
    silent, dying = dist.new_group([0, 1, 2]), dist.new_group([0, 1, 2])
    never = MoEContext(problem.spec, silent, "reference", device="cpu", timeout_s=2)
    loop = MoEContext(problem.spec, dying, "reference", device="cpu", timeout_s=30)
    results: dict[str, Any] = {}
    start = time.monotonic()
    if rank < 2:
        try:
            mega_moe(*tokens, local, never)
        except MegaMoETimeout as error:
            results["silent"] = str(error)
        results["silent seconds"] = time.monotonic() - start
    else:
        time.sleep(3)
    calls = 0
    start = time.monotonic()
    try:
        while True:
            if rank == 2 and calls == 3:
                os._exit(9)
            mega_moe(*tokens, local, loop)
            calls += 1
    except MegaMoeError as error:
        results["dead"] = f"{type(error).__name__}: {error}"
    results["calls"] = calls
    results["dead seconds"] = time.monotonic() - start
    return results


def test_a_lost_rank_is_named() -> None:
    ranks = run_ranks(3, "test_reference_distributed:rank_that_may_be_left", timeout_s=60, may_die=(2,))
    assert ranks[2] is None
    for rank, results in enumerate(ranks[:2]):
        print(rank, results)
        assert results["silent"].startswith(f"exchange of counts: rank {rank} waited 2.")
        assert results["silent"].endswith(" s for rank 2, which did not answer")
        assert results["silent seconds"] < 10
        # the last message of a process that is killed may be lost with it
        assert results["calls"] in (2, 3)
        # a survivor may learn of it from the other survivor, which gives up first
        assert re.match(
            f"MegaMoeError: (exchange of counts|dispatch|combine): rank {rank} lost rank [0-2]; ", results["dead"]
        )
        assert results["dead seconds"] < 25
    assert any("lost rank 2; its process has ended" in results["dead"] for results in ranks[:2])


def test_expert_parallel_without_torch_distributed_is_refused() -> None:
    config = MoEConfig.from_dict(
        {
            "model": {"hidden": 32, "intermediate": 32, "num_experts": 8, "top_k": 2},
            "router": {"score": "softmax"},
            "parallel": {"expert_parallel_size": 4},
        }
    )
    with pytest.raises(ConfigError, match="size is 4 and torch.distributed is not initialised; start the job with"):
        MoELayer(config)
