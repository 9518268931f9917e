"""The C++ engine against the oracle, on ranks that are threads of this process."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from helpers_moe import check, local_weights, make_problem, make_tokens
from torch import Tensor

pytest.importorskip("megamoe._host", reason="the C++ engine is not built")

from helpers_engine import ThreadRanks, instruction_sets, make_spec

from megamoe.errors import MegaMoeError
from megamoe.kernels.packed import pack_experts
from megamoe.workspace import Workspace

Tokens = tuple[Tensor, Tensor, Tensor]


def tokens_for(spec, counts, seed=0, dtype=torch.float32) -> list[Tokens]:
    return [make_tokens(spec, count, seed=100 * seed + rank, dtype=dtype) for rank, count in enumerate(counts)]


# every format, activation and position once, and every dtype with every format
GRID = [
    dict(weight_format=form, activation=act, swiglu_limit=limit, weight_position=position, expert_bias=bias)
    for form, (act, limit), position, bias in product(
        ("none", "mxfp4", "fp8_block"),
        (("silu", None), ("swiglu_clamp", 1.5), ("swiglu_oai", 7.0)),
        ("after", "before"),
        (False, True),
    )
]


@pytest.mark.parametrize("options", GRID, ids=lambda o: "-".join(str(v) for v in o.values()))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_every_format_and_activation(options: dict, dtype: torch.dtype) -> None:
    spec = make_spec(**options)
    problem = make_problem(spec, dtype=dtype)
    ranks = ThreadRanks([spec], 2)
    tokens = tokens_for(spec, [21, 40], dtype=dtype)
    for y, own in zip(ranks.run(ranks.pack(problem), tokens), tokens, strict=True):
        check(problem, y, *own)


@pytest.mark.parametrize(
    ("hidden", "intermediate", "experts", "top_k", "world_size"),
    [
        (256, 128, 16, 6, 4),
        (448, 192, 24, 6, 2),
        (256, 96, 8, 8, 1),
        (180, 180, 8, 4, 2),
        (128, 320, 6, 2, 2),
        (36, 20, 3, 1, 3),
    ],
)
@pytest.mark.parametrize("form", ["none", "mxfp4", "fp8_block"])
def test_shapes(hidden: int, intermediate: int, experts: int, top_k: int, world_size: int, form: str) -> None:
    if form == "mxfp4":
        hidden, intermediate = -(-hidden // 32) * 32, -(-intermediate // 32) * 32
    for scale in ("none",) if form == "none" else ("token", "block128"):
        spec = make_spec(
            hidden=hidden,
            intermediate=intermediate,
            num_experts=experts,
            top_k=top_k,
            weight_format=form,
            act_scale=scale,
        )
        problem = make_problem(spec)
        ranks = ThreadRanks([spec], world_size, max_tokens=150)
        tokens = tokens_for(spec, [130, 0, 1, 65][:world_size])
        for y, own in zip(ranks.run(ranks.pack(problem), tokens), tokens, strict=True):
            check(problem, y, *own)


def test_hot_rank() -> None:
    """Case C1: every row goes to the last rank, all tokens to the same experts, 50 times; then a balanced call."""
    spec = make_spec(num_experts=16, top_k=4)
    problem = make_problem(spec)
    ranks = ThreadRanks([spec], 4, max_tokens=512)
    experts = ranks.pack(problem)
    hot = tokens_for(spec, [512] * 4)
    for _, ids, _ in hot:
        ids.copy_(torch.tensor([12, 13, 14, 15]))
    first = ranks.run(experts, hot)
    for y, own in zip(first, hot, strict=True):
        check(problem, y, *own)

    def many(rank: int) -> None:
        for _ in range(50):
            y = ranks.workspaces[rank].run(*hot[rank], experts[rank])
            assert torch.equal(y, first[rank])

    ranks.each(many)
    for rank in range(4):
        assert not any(ranks.counters(rank).values()), f"rank {rank}: {ranks.counters(rank)}"
    balanced = tokens_for(spec, [512] * 4, seed=1)
    for y, own in zip(ranks.run(experts, balanced), balanced, strict=True):
        check(problem, y, *own)


def test_empty_ranks() -> None:
    """Case C2: token counts rotate over the ranks, and no host synchronisation stands between the calls."""
    spec = make_spec()
    problem = make_problem(spec)
    ranks = ThreadRanks([spec], 4, max_tokens=512)
    experts = ranks.pack(problem)
    counts = [0, 512, 1, 7]
    rounds = [tokens_for(spec, counts[shift % 4 :] + counts[: shift % 4], seed=shift) for shift in range(8)]
    # in the last round one rank owns tokens and gets none: its experts are never asked for
    for _, ids, _ in rounds[-1]:
        ids[ids >= 6] -= 6

    def loop(rank: int) -> list[Tensor]:
        return [ranks.workspaces[rank].run(*tokens[rank], experts[rank]) for tokens in rounds]

    for rank, results in enumerate(ranks.each(loop)):
        for y, tokens in zip(results, rounds, strict=True):
            assert y.shape == tokens[rank][0].shape
            check(problem, y, *tokens[rank])


def test_ids() -> None:
    """Case C3: -1 with a NaN weight, rows of -1, duplicates, both integer types, an id that is no expert."""
    spec = make_spec(hidden=256, intermediate=96, num_experts=128, top_k=8)
    problem = make_problem(spec)
    ranks = ThreadRanks([spec], 2, max_tokens=257)
    experts = ranks.pack(problem)
    tokens = tokens_for(spec, [257, 257])
    generator = torch.Generator().manual_seed(1)
    for x, ids, weights in tokens:
        none = torch.rand(ids.shape, generator=generator) < 0.3
        none[torch.rand(len(x), generator=generator) < 0.1] = True
        ids[none], weights[none] = -1, float("nan")
        ids[0] = torch.tensor([5, 5, 5, 5, 9, 9, -1, 0])
        weights[0] = torch.tensor([0.1, 0.2, 0.3, 0.1, 0.2, 0.1, float("nan"), 0.4])
    results = ranks.run(experts, tokens)
    for y, own in zip(results, tokens, strict=True):
        check(problem, y, *own)
        empty = (own[1] < 0).all(dim=1)
        assert bool(empty.any()) and bool((y[empty] == 0).all())
    narrow = [(x, ids.to(torch.int32), weights) for x, ids, weights in tokens]
    assert all(torch.equal(a, b) for a, b in zip(results, ranks.run(experts, narrow), strict=True))

    for too_large in (128, 1 << 40, (1 << 32) + 5):  # the last: its low half names an expert
        bad = [(x, ids.clone(), weights) for x, ids, weights in tokens]
        bad[1][1][3, 2] = too_large
        without = [(x, ids.where(ids < 128, -1), weights) for x, ids, weights in bad]
        expected = ranks.run(experts, without)
        assert all(torch.equal(a, b) for a, b in zip(ranks.run(experts, bad), expected, strict=True))

        def checked(rank: int, bad: list[Tokens] = bad) -> Tensor:
            return ranks.workspaces[rank].run(*bad[rank], experts[rank], check=True)

        _, errors = ranks.outcomes(checked)
        for error in errors:
            assert isinstance(error, MegaMoeError)
            assert "rank 1 has 1 ids above the last expert; valid are 0 to 127" in str(error)
    assert all(torch.equal(a, b) for a, b in zip(results, ranks.run(experts, tokens, check=True), strict=True))


@pytest.mark.parametrize("num_tokens", [1024, 1025, 2051])
def test_more_tokens_than_the_bound(num_tokens: int) -> None:
    """Case C4: chunks give the same bits as one large generation; without chunks every rank raises the same error."""
    spec = make_spec(num_experts=9)
    problem = make_problem(spec)
    tokens = tokens_for(spec, [num_tokens, 16, 16])
    large = ThreadRanks([spec], 3, max_tokens=2051)
    small = ThreadRanks([spec], 3, max_tokens=1024)
    experts = small.pack(problem)
    expected = large.run(experts, tokens)
    for y, other, own in zip(small.run(experts, tokens), expected, tokens, strict=True):
        check(problem, y, *own)
        assert torch.equal(y, other)
    results, errors = small.outcomes(
        lambda rank: small.workspaces[rank].run(*tokens[rank], experts[rank], overflow="error")
    )
    if num_tokens <= 1024:
        assert errors == [None] * 3
        return
    assert len({str(error) for error in errors}) == 1
    assert f"rank 0 brought {num_tokens} tokens, the bound is 1024" in str(errors[0])
    assert all(torch.equal(a, b) for a, b in zip(small.run(experts, tokens), expected, strict=True))


def test_bits_do_not_depend_on_company() -> None:
    """The same token alone, in a batch, with other workers, ranks, row blocks, and with scalar code: the same bits."""
    for form in ("none", "mxfp4", "fp8_block"):
        spec = make_spec(weight_format=form, num_experts=4, top_k=2)
        problem = make_problem(spec)
        x, ids, weights = make_tokens(spec, 150)
        ids[:100] = torch.tensor([0, 3])  # one expert with many row blocks
        runs: dict[str, Tensor] = {}
        other_sets = [(1, 2, isa) for isa in instruction_sets()]
        for world_size, workers, isa in [(1, 1, ""), (1, 3, ""), (2, 2, ""), (4, 1, ""), *other_sets]:
            ranks = ThreadRanks([spec], world_size, max_tokens=150, num_workers=workers, isa=isa)
            cut = [(150 * r // world_size, 150 * (r + 1) // world_size) for r in range(world_size)]
            parts = [(x[a:b].contiguous(), ids[a:b].contiguous(), weights[a:b].contiguous()) for a, b in cut]
            runs[f"{world_size} ranks, {workers} workers {isa}"] = torch.cat(ranks.run(ranks.pack(problem), parts))
        alone = ThreadRanks([spec], 1, max_tokens=4)
        experts = alone.pack(problem)
        for token in (0, 1, 99, 100, 149):
            row = slice(token, token + 1)
            (y,) = alone.run(experts, [(x[row].clone(), ids[row].clone(), weights[row].clone())])
            assert torch.equal(y[0], runs["1 ranks, 1 workers "][token]), f"{form}: token {token} alone"
        first = next(iter(runs.values()))
        for name, y in runs.items():
            assert torch.equal(y, first), f"{form}: {name}"


@pytest.mark.parametrize("form", ["fp32", "bf16", "fp8_block", "mxfp4"])
def test_bits_do_not_depend_on_the_instruction_set(form: str) -> None:
    """Any codes and scales, those of zero, infinity and NaN among them; one row, a few, many; rows of odd lengths."""
    plain = form in ("fp32", "bf16")
    sizes = dict(hidden=52, intermediate=37) if plain else dict(hidden=192, intermediate=96)
    spec = make_spec(weight_format="none" if plain else form, num_experts=4, top_k=1, **sizes)
    problem = make_problem(spec, dtype=torch.bfloat16 if form == "bf16" else torch.float32)
    generator = torch.Generator().manual_seed(2)
    weights = problem.weights
    if not plain:
        assert weights.w13_scale is not None and weights.w2_scale is not None
        for codes in (weights.w13, weights.w2):
            draw = torch.randint(0, 256, codes.shape, generator=generator, dtype=torch.uint8)
            draw[0] &= 0x77  # expert 0 has no NaN and no negative codes
            codes.view(torch.uint8).copy_(draw)
    if form == "mxfp4":
        for scale in (weights.w13_scale, weights.w2_scale):
            scale.copy_(torch.randint(0, 256, scale.shape, generator=generator, dtype=torch.uint8))  # type: ignore
            scale[:2] = scale[:2] % 16 + 118  # type: ignore
    counts = (1, 2, 7, 12, 16, 64, 70)
    batches = [make_tokens(spec, count, seed=count) for count in counts]
    for index, (_, ids, _) in enumerate(batches):
        ids.copy_(torch.arange(len(ids))[:, None] % 4 if len(ids) > 1 else torch.tensor([[index]]))
    results: dict[str, list[Tensor]] = {}
    for isa in instruction_sets():
        ranks = ThreadRanks([spec], 1, max_tokens=80, isa=isa)
        experts = ranks.pack(problem)
        results[isa] = [y for tokens in batches for y in ranks.run(experts, [tokens])]
    print({isa: [int(y.isfinite().sum()) for y in ys] for isa, ys in results.items()})
    for isa, ys in results.items():
        for y, truth in zip(ys, results["scalar"], strict=True):
            assert bool(truth.isfinite().any())
            assert torch.equal(y.isnan(), truth.isnan()), isa
            assert torch.equal(y.nan_to_num(0.0).view(torch.int32), truth.nan_to_num(0.0).view(torch.int32)), isa


@pytest.mark.slow
def test_two_layers_alternate_on_one_workspace() -> None:
    """Case C20: 200 calls of two layers of different shape, unequal tokens, no synchronisation between the ranks."""
    specs = [make_spec(), make_spec(hidden=192, intermediate=64, num_experts=4, top_k=2, weight_format="fp8_block")]
    problems = [make_problem(spec, seed=i) for i, spec in enumerate(specs)]
    ranks = ThreadRanks(specs, 2, max_tokens=64)
    experts = [ranks.pack(problem) for problem in problems]
    generator = torch.Generator().manual_seed(5)
    counts = torch.randint(0, 65, (20, 2), generator=generator).tolist()
    batches = [tokens_for(specs[i % 2], counts[i], seed=i) for i in range(20)]

    def loop(rank: int) -> list[Tensor]:
        results = []
        for call in range(200):
            y = ranks.workspaces[rank].run(*batches[call % 20][rank], experts[call % 2][rank])
            if call < 20:
                results.append(y)
            else:
                assert torch.equal(y, results[call % 20]), f"call {call}"
        return results

    for rank, results in enumerate(ranks.each(loop)):
        for call, y in enumerate(results):
            check(problems[call % 2], y, *batches[call][rank])


def test_bytes_are_known_beforehand() -> None:
    specs = [make_spec(), make_spec(hidden=256, num_experts=16)]
    nbytes = Workspace.bytes_for(specs, world_size=2, max_tokens_per_rank=64, num_workers=2)
    ranks = ThreadRanks(specs, 2, num_workers=2)
    assert [w.nbytes for w in ranks.workspaces] == [nbytes] * 2
    assert ranks.workspaces[0].serves(specs[0], 64) and ranks.workspaces[0].serves(specs[1], 64)
    assert not ranks.workspaces[0].serves(make_spec(hidden=4096), 64)
    assert not ranks.workspaces[0].serves(specs[0], 65)


def test_ranks_may_have_different_numbers_of_workers() -> None:
    spec = make_spec(intermediate=320)
    problem = make_problem(spec)
    ranks = ThreadRanks([spec], 2, num_workers=[1, 9])
    tokens = tokens_for(spec, [64, 33])
    for y, own in zip(ranks.run(ranks.pack(problem), tokens), tokens, strict=True):
        check(problem, y, *own)


def test_other_layout_is_refused_by_name() -> None:
    spec = make_spec()
    problem = make_problem(spec)
    ranks = ThreadRanks([spec], 1)
    packed = pack_experts(local_weights(problem, 0, 1), spec)
    packed.layout_id = "sm90_rs"
    with pytest.raises(ValueError, match="packed for the layout sm90_rs"):
        ranks.workspaces[0].run(*make_tokens(spec, 3), packed)
