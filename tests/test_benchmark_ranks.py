"""What the benchmarks over several ranks work out without a GPU: routing, bytes, overlap, lags, the unfused layer."""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megamoe._host", reason="the C++ engine is not built")

from helpers_dist import run_ranks  # noqa: E402

from megamoe.config import MoESpec  # noqa: E402
from megamoe.kernels import formats  # noqa: E402
from megamoe.kernels.jit import JitSettings, build  # noqa: E402
from megamoe.kernels.mega_moe import INSTANCES  # noqa: E402
from megamoe.kernels.packing import pack_mxfp4  # noqa: E402
from megamoe.testing.numeric import compare, diff  # noqa: E402
from megamoe.testing.oracle import moe_oracle  # noqa: E402
from megamoe.trace import Trace  # noqa: E402

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield
    own = {path.stem for path in BENCHMARKS.glob("*.py")}
    for name in own & set(sys.modules):
        sys.modules.pop(name)


# ---- routing --------------------------------------------------------------------------------------------------------


def drawn(skew: str, tokens: int = 4000, experts: int = 64, top_k: int = 6, ranks: int = 2) -> tuple[Any, Any]:
    from moe_routing import draw_ids

    return draw_ids(skew, tokens, experts, top_k, experts // ranks, torch.Generator().manual_seed(3))


@pytest.mark.parametrize("skew", ["none", "zipf", "hot_expert", "hot_rank"])
@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_every_token_has_distinct_experts_and_weights_of_sum_one(skew: str, ranks: int) -> None:
    ids, weights = drawn(skew, tokens=500, ranks=ranks)
    assert ids.shape == weights.shape == (500, 6) and ids.dtype == torch.int64 and weights.dtype == torch.float32
    assert int(ids.min()) >= 0 and int(ids.max()) < 64
    assert all(len(set(row)) == 6 for row in ids.tolist())
    torch.testing.assert_close(weights.sum(-1), torch.ones(500))
    assert bool((weights > 0).all())


def test_the_skews_are_what_they_are_called() -> None:
    from moe_routing import SKEWS, imbalance

    even = torch.bincount(drawn("none")[0].flatten(), minlength=64)
    assert 0.8 < float(even.min()) / 375 and float(even.max()) / 375 < 1.2
    hot = torch.bincount(drawn("hot_expert")[0].flatten(), minlength=64)
    assert int(hot[0]) == 4000 and float(hot[1:].max()) < 1.2 * 4000 * 5 / 63
    rank = torch.bincount(drawn("hot_rank", ranks=8)[0].flatten(), minlength=64)
    assert 0.45 < float(rank[:8].sum()) / 24000 < 0.75  # of 3/4, less what distinct experts take from it
    zipf = torch.bincount(drawn("zipf")[0].flatten(), minlength=64).sort(descending=True).values
    assert float(zipf[0]) > 6 * float(zipf[32:].float().mean()) and int(zipf[-1]) > 0
    assert imbalance([[3, 1, 0, 0], [3, 1, 0, 0]], 2) == (2.0, 3.0)
    assert imbalance([[0, 0]], 1) == (1.0, 1.0)
    with pytest.raises(ValueError, match="must be one of none, zipf, hot_expert, hot_rank, got 'warm'"):
        drawn("warm")
    assert set(SKEWS) == {"none", "zipf", "hot_expert", "hot_rank"}


def test_options_are_refused_in_one_sentence() -> None:
    from mega_moe import models_of, skews_of, token_counts_of
    from mega_moe_lag import lags_of

    assert models_of("flash,pro") == ["flash", "pro"] and token_counts_of("1,8192") == [1, 8192]
    assert skews_of("none,zipf") == ["none", "zipf"] and lags_of("1,own,all") == ["1", "own", "all"]
    for function, text, said in (
        (models_of, "flash,big", "unknown 'big'; choose among flash, pro"),
        (skews_of, "zip", "unknown 'zip'; choose among none"),
        (token_counts_of, "8,0", "whole numbers from 1 to 8192"),
        (token_counts_of, "8,x", "whole numbers from 1 to 8192"),
        (token_counts_of, "8193", "whole numbers from 1 to 8192"),
        (lags_of, "0", "whole numbers from 1 on, own or all"),
    ):
        with pytest.raises(argparse.ArgumentTypeError, match=said):
            function(text)


# ---- bytes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ranks", "local", "top_k"), [(1, 4, 2), (2, 3, 3), (4, 2, 4), (8, 1, 2)])
def test_bytes_are_those_of_every_single_row(ranks: int, local: int, top_k: int) -> None:
    from link_traffic import PULL_GBPS, PUSH_GBPS, link_us, traffic

    dice = random.Random(ranks)
    hidden, experts = 96, ranks * local
    counts = [[0] * experts for _ in range(ranks)]
    moved: Counter[tuple[str, int]] = Counter()
    for source in range(ranks):
        for _ in range(dice.randrange(40)):
            for expert in dice.sample(range(experts), top_k):
                counts[source][expert] += 1
                owner = expert // local
                if owner == source:
                    moved["local", source] += 1
                    continue
                for direction, rank in (("dispatch_out", source), ("dispatch_in", owner)):
                    moved[direction, rank] += hidden  # an E4M3 row
                for direction, rank in (("combine_out", owner), ("combine_in", source)):
                    moved[direction, rank] += 2 * hidden  # a BF16 row
                for direction, rank in (("side_in", owner), ("side_out", source)):
                    moved[direction, rank] += 12  # its list entry and scale
                for direction, rank in (("side_out", owner), ("side_in", source)):
                    moved[direction, rank] += 8  # its tag
        for peer in range(ranks):
            if peer != source:
                moved["side_out", source] += 4 * local + 56
                moved["side_in", peer] += 4 * local + 56
    found = traffic(counts, hidden)
    for rank, one in enumerate(found):
        assert one.local_rows == moved["local", rank]
        for name in ("dispatch_in", "dispatch_out", "combine_in", "combine_out", "side_in", "side_out"):
            assert getattr(one, name) == moved[name, rank], (name, rank)
        assert one.rows * hidden == one.dispatch_in and one.sent_rows * hidden == one.dispatch_out
    assert sum(one.dispatch_in for one in found) == sum(one.dispatch_out for one in found)
    busiest = max(
        moved[f"dispatch_{way}", rank] / PULL_GBPS + moved[f"combine_{way}", rank] / PUSH_GBPS
        for rank in range(ranks)
        for way in ("in", "out")
    )
    assert link_us(found) == pytest.approx(busiest * 1e-3)


@pytest.mark.parametrize(("block_rows", "pulls"), [(256, 8), (40, 2), (8, 2)])
def test_pull_parts_cover_every_row_once(block_rows: int, pulls: int) -> None:
    from link_traffic import pull_parts, rows_of_block, traffic

    dice = random.Random(block_rows)
    ranks, local = 3, 4
    counts = [[dice.choice([0, 1, 7, 40, 300]) for _ in range(ranks * local)] for _ in range(ranks)]
    for rank in range(ranks):
        # one row after the other, as the puller looks them up
        rows: dict[tuple[int, int, int], list[int]] = {}
        block = 0
        for expert in range(local):
            sources = [s for s in range(ranks) for _ in range(counts[s][rank * local + expert])]
            for first in range(0, len(sources), block_rows):
                for index in range(pulls):
                    rows[expert, block, index] = [0, 0]
                for i, source in enumerate(sources[first : first + block_rows]):
                    rows[expert, block, i // -(-block_rows // pulls)][source != rank] += 1
                block += 1
        found = pull_parts(counts, rank, block_rows, pulls)
        assert found == {key: tuple(value) for key, value in rows.items()}
        one = traffic(counts, 64)[rank]
        assert (sum(p[0] for p in found.values()), sum(p[1] for p in found.values())) == (one.local_rows, one.rows)
        blocks = rows_of_block(found)
        assert len(blocks) == block and sum(sum(value) for value in blocks.values()) == one.local_rows + one.rows


# ---- overlap --------------------------------------------------------------------------------------------------------


def event(name: str, cat: str, start: float, end: float, block: int = 0, index: int = 0) -> dict[str, Any]:
    place = {"call": 0, "expert": 0, "row_block": block, "index": index}
    times = {"ts": 100.0 + start, "dur": float(end - start)}
    return {"name": name, "cat": cat, "ph": "X", "pid": 0, "tid": 0, **times, "args": place}


def test_overlap_of_a_small_call() -> None:
    from trace_overlap import overlap, table

    events = [
        event("call", "cta", 0, 100),
        event("pull e0 b0 c0", "math", 10, 20, 0, 0),
        event("pull e0 b0 c1", "pull", 10, 30, 0, 1),
        event("l1 e0 b0 c0", "math", 10, 50, 0, 0),  # waits until 30
        event("l1 e0 b0 c1", "math", 40, 60, 0, 1),
        event("pull e0 b1 c0", "pull", 40, 60, 1, 0),
        event("pull e0 b1 c1", "pull", 70, 90, 1, 1),
        event("l2 e0 b0 c0", "math", 60, 70, 0, 0),
        event("l1 e0 b1 c0", "math", 90, 95, 1, 0),
        event("claim c1", "scheduler", 0, 5),
    ]
    parts = {(0, 0, 0): (2, 0), (0, 0, 1): (0, 2), (0, 1, 0): (0, 2), (0, 1, 1): (1, 1)}
    found = overlap(events, 2, parts, 1000)
    assert (found.call_us, found.first_pull, found.last_pull) == (100, 10, 90)
    assert (found.first_l1, found.first_l2, found.first_scatter) == (30, 60, 70)
    assert (found.last_l1, found.last_l2) == (95, 70)
    assert found.pulled_mb == pytest.approx(5e-3)
    # b0 c1: nobody works from 10 to 30; b1 c0: 30-50 and 40-60 of two CTAs while 40-60: 1.5 of 2; b1 c1: 70-90: nobody
    assert found.hidden_pull == pytest.approx((2 * 0 + 2 * 0.75 + 1 * 0) / 5)
    assert found.hidden_scatter == 0  # the other CTA does nothing at 70
    assert found.rows_wait == pytest.approx(20 / (2 * 95))
    assert found.at_work == pytest.approx((20 + 20 + 10 + 5) / 200)
    assert found.rate_before == pytest.approx(4000 / 60 * 1e-3) and found.rate_after == pytest.approx(1000 / 20 * 1e-3)
    assert (found.pulls_before, found.pulls_after, found.pull_us_before, found.pull_us_after) == (3, 1, 20, 20)
    lines = table([("rank 0", found), ("rank 1", found)]).splitlines()
    assert lines[0].split() == ["rank", "0", "rank", "1"] and lines[1].split() == ["call_us", "100.0", "100.0"]
    with pytest.raises(ValueError, match="the trace has 4 pulls and the routing 1"):
        overlap(events, 2, {(0, 0, 0): (1, 1)}, 1000)


@pytest.mark.filterwarnings("ignore:.*had more events than its buffer holds")
def test_calls_of_a_trace_file(tmp_path: Path) -> None:
    """As the trace itself writes it; one with events that found no room is not worked out."""
    from trace_overlap import calls_of

    place = (0, 2, 0, 0, 0, 1)  # math, L1
    for dropped in (0, 3):
        trace = Trace(tmp_path / f"{dropped}.json", rank=0)
        for count in (1, 2):
            events = [(*place, 1000 + 10 * i, 1005 + 10 * i) for i in range(count)]
            trace.add_cta(trace.new_call(), 0, events, start=1000, dropped=dropped)
        trace.write()
    found = calls_of(tmp_path / "0.json")
    assert {call: [event["cat"] for event in events] for call, events in found.items()} == {
        0: ["math", "cta"],
        1: ["math", "math", "cta"],
    }
    with pytest.raises(ValueError, match="6 events are missing"):
        calls_of(tmp_path / "3.json")


def test_the_mean_of_open_intervals_is_that_of_many_samples() -> None:
    from trace_overlap import _Active

    dice = random.Random(0)
    spans = [(start, start + dice.uniform(0, 30)) for start in (dice.uniform(0, 100) for _ in range(40))]
    active = _Active(spans)
    for _ in range(20):
        begin = dice.uniform(0, 100)
        end = begin + dice.uniform(1, 40)
        exact = sum(max(0.0, min(end, b) - max(begin, a)) for a, b in spans) / (end - begin)
        assert active.mean(begin, end) == pytest.approx(exact)
        assert active.at(begin) == sum(a <= begin < b for a, b in spans)


# ---- lags -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tokens", "name"), [(2048, "prefill"), (8192, "expanded")])
def test_a_lag_changes_the_lag_and_the_ring_alone(tokens: int, name: str) -> None:
    from mega_moe_lag import LAG, RING2, units_of, varied, with_lag

    spec = MoESpec(hidden=4096, intermediate=2048, num_experts=64, top_k=6, weight_format="mxfp4", act_scale="token")
    instance, rows = varied(spec, tokens, 2), tokens * 2 * 6 // 64
    assert instance is INSTANCES[name]
    own = instance.tile(spec, rows, tokens)
    changed = with_lag(instance, own[LAG] + 5).tile(spec, rows, tokens)
    assert [i for i in range(len(own)) if own[i] != changed[i]] == [LAG, RING2]
    assert changed[LAG] == own[LAG] + 5 and changed[RING2] == own[RING2] + 5
    assert with_lag(instance, own[LAG]).tile(spec, rows, tokens) == own
    # the same kernel: what a lag changes is an argument
    assert with_lag(instance, own[LAG] + 5).source() == instance.source()
    with pytest.raises(ValueError, match="64 tokens a rank are run by the instance decode, and .* ask for more tokens"):
        varied(spec, 64, 2)
    # the second rank: 257 rows are two blocks, one unit; 2049 are nine blocks of 256, two units of eight
    tile = (256, 8, *own[2:])
    assert units_of([[0, 1, 257, 2000], [0, 0, 0, 49]], tile) == 3


# ---- the unfused layer ----------------------------------------------------------------------------------------------

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, LIMIT = 256, 384, 12, 3, 10.0


def problem() -> tuple[Any, ...]:
    """Return w13, w2 as MXFP4 codes and scales, and dequantised."""
    g = torch.Generator().manual_seed(0)

    def codes(*shape: int) -> Any:
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=g)

    def scales(rows: int, k: int) -> Any:
        return torch.randint(120, 124, (EXPERTS, rows, k // 32), dtype=torch.uint8, generator=g)

    w13 = (codes(EXPERTS, 2 * INTERMEDIATE, HIDDEN // 2), scales(2 * INTERMEDIATE, HIDDEN))
    w2 = (codes(EXPERTS, HIDDEN, INTERMEDIATE // 2), scales(HIDDEN, INTERMEDIATE))
    return w13, w2, formats.dequantize_mxfp4(*w13).float(), formats.dequantize_mxfp4(*w2).float()


def run_unfused(rank: int, world_size: int, arguments: Any) -> Any:
    import torch.distributed as dist

    sys.path.insert(0, str(BENCHMARKS))
    from moe_routing import draw_ids
    from unfused_layer import UnfusedLayer

    w13, w2, _, _ = problem()
    local = slice(rank * EXPERTS // world_size, (rank + 1) * EXPERTS // world_size)
    packed = [pack_mxfp4(codes[local], scales[local], "sm90_ss") for codes, scales in (w13, w2)]
    assert dist.group.WORLD is not None
    layer = UnfusedLayer(packed[0], packed[1], LIMIT, dist.group.WORLD)
    found = []
    for skew, tokens in (("none", 50), ("hot_rank", 3 + 20 * rank), ("none", 1)):
        g = torch.Generator().manual_seed(10 + rank)
        x = torch.randn(tokens, HIDDEN, generator=g).to(torch.bfloat16)
        ids, weights = draw_ids(skew, tokens, EXPERTS, TOP_K, EXPERTS // world_size, g)
        if skew == "hot_rank":  # a rank without rows
            ids = torch.arange(TOP_K).expand(tokens, TOP_K).contiguous()
        y = layer(x, ids, weights)
        same = layer(x, ids, weights, layer.splits(ids))
        found.append((x, ids, weights, y, torch.equal(y, same)))
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_unfused_layer_gives_what_the_oracle_says(world_size: int) -> None:
    from unfused_layer import CHAIN_DIFF, chain, differs

    _, _, w13, w2 = problem()
    for rows in run_ranks(world_size, "test_benchmark_ranks:run_unfused", timeout_s=100):
        for x, ids, weights, y, same in rows:
            assert same
            compared = compare(y, chain(x, ids, weights, w13, w2, LIMIT), "quantised")
            assert compared.ok, compared.text
            fused = moe_oracle(
                x,
                ids,
                weights,
                w13,
                w2,
                activation="swiglu_clamp",
                limit=LIMIT,
                weight_format="mxfp4",
                act_scale="token",
            )
            print(f"to the mega-kernel's rounding points: diff {diff(y, fused):.2e}")
            assert differs(y, fused) == ""
            assert f"at most {CHAIN_DIFF:.0e}" in differs(y.roll(1, -1), fused)


def test_its_kernels_compile_without_spills(tmp_path: Path) -> None:
    from unfused_kernels import unfused_sources

    pytest.importorskip("cuda.bindings.nvrtc", reason="cuda.core with NVRTC is not installed (megamoe[cuda13])")
    for source in unfused_sources():
        usage = build(source, JitSettings(cache_dirs=(tmp_path,))).usage
        assert usage.is_clean, (source.name, usage)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [0, 1, 77])
def test_its_kernels_do_what_torch_does(rows: int) -> None:
    from unfused_kernels import activate_quantise, weighted_sum

    g = torch.Generator().manual_seed(rows)
    sums = (6 * torch.randn(rows, 2 * INTERMEDIATE, generator=g)).to(torch.bfloat16)
    for limit in (None, LIMIT):
        h, scale = activate_quantise(sums.cuda(), limit)
        expected = formats.dequantize_e4m3(*activate_quantise(sums, limit), "block128")
        actual = formats.dequantize_e4m3(h.cpu(), scale.cpu().contiguous(), "block128")
        assert scale.shape == (rows, INTERMEDIATE // 128)
        # a step of E4M3 where a fast exponential turns a rounding
        assert compare(actual, expected, "quantised").ok
    if rows:
        slots = torch.randn(3 * rows, HIDDEN, generator=g).to(torch.bfloat16)
        places = torch.randperm(3 * rows, generator=g).view(rows, 3)
        weights = torch.rand(rows, 3, generator=g)
        y = weighted_sum(slots.cuda(), places.cuda(), weights.cuda())
        assert compare(y.cpu(), weighted_sum(slots, places, weights), "bf16").ok


# ---- tables and plot ------------------------------------------------------------------------------------------------


def written(tmp_path: Path) -> list[Path]:
    """Write result files as a run on two ranks leaves them."""

    def row(case: str, method: str, us: float, **more: Any) -> dict[str, Any]:
        return {"case": f"model={case} weights=mxfp4 scale=token ranks=2 comm=auto", "method": method, "us": us, **more}

    fused = {"dispatch_bytes": 2_000_000, "combine_bytes": 4_000_000, "link_us": 25.0}
    fused |= {"fullest_rank": 1.0, "fullest_expert": 1.1, "floor_us": None}
    rows = [
        row("flash T=8", "chilled", 150.4, **fused),
        row("flash T=8", "back to back", 140.0, **fused),
        row("flash T=128", "back to back", 200.0, **fused),
        row("flash T=8 impl=unfused counts=known", "chilled", 300.0, peer="mega-kernel", peer_us=150.4),
        row("flash T=8 impl=unfused counts=host_sync", "chilled", 400.0, peer="mega-kernel", peer_us=150.4),
        row("flash T=8 skew=zipf", "chilled", 170.0, **{**fused, "fullest_rank": 1.25}),
        row("flash T=2048 lag=3", "chilled", 900.0, own_lag=3, units=32),
        row("flash T=2048 lag=3", "back to back", 910.0, own_lag=3, units=32),
        row("flash T=2048 lag=32", "chilled", 950.0, own_lag=3, units=32),
        row("flash T=2048 lag=32", "back to back", 960.0, own_lag=3, units=32),
    ]
    from trace_overlap import Overlap

    sums = {name: 7.0 for name in Overlap.__dataclass_fields__}
    rows.append({**row("flash T=2048", "trace", 0.0), "rank": 1, **sums})
    path = tmp_path / "mega_moe-h200-ep2.json"
    path.write_text(json.dumps({"gpu": "NVIDIA H200", "rows": rows}))
    return [path]


def test_tables_show_every_row_of_the_results(tmp_path: Path) -> None:
    from ranks_table import tables

    text = tables(written(tmp_path))
    for line in (
        "| flash | mega-kernel | 2 | chilled | 150 | - | - | - | - | - | - |",
        "| flash | mega-kernel | 2 | back to back | 140 | 200 | - | - | - | - | - |",
        "| flash | unfused, counts known | 2 | chilled | 300 | - | - | - | - | - | - |",
        "| flash | unfused, waits for counts | 2 | chilled | 400 | - | - | - | - | - | - |",
        "| flash | public FP8 mega-kernel, 8 GPUs | 8 | chilled | 223 | 265 | 580 | 954 | 1727 | 3176 |".replace(
            "  ", " "
        ),
        "| flash | 2 | 8 | zipf | 1.25 | 1.10 | 170 | - |",
        "| flash | 2 | 8 | none | 1.00 | 1.10 | 150 | 140 |",
        "| flash | 2 | 8 | 2.00 | 4.00 | 25.0 | 150 | 0.17 |",
        "| flash | 2 | 2048 | 3 (own) | 900 | 910 |",
        "| flash | 2 | 2048 | 32 (all) | 950 | 960 |",
        "| flash | 2048 | none | 1 | 7 | 7 | 7 | 7 | 7.00 | 7.00 | 7.000 | 7.00 | 7 | 7 | 7.0 | 7.0 |",
    ):
        assert any(shown.startswith(line.rstrip(" |-")) for shown in text.splitlines()), line
    assert "pro" not in text


def test_the_readme_table_has_plain_rows_alone(tmp_path: Path) -> None:
    from readme_table import mega_table

    lines = mega_table(written(tmp_path)).splitlines()
    assert len(lines) == 4 and "unfused" not in "".join(lines)


def test_the_plot_has_a_line_for_every_layer(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from mega_moe_plot import figure, save

    paths = written(tmp_path)
    flash, pro = figure(paths).axes
    drawn = {line.get_label(): list(zip(*line.get_data(), strict=True)) for line in flash.get_lines()}
    assert drawn["mega-kernel, 2 GPUs, chilled"] == [(8, 150.4)]
    assert drawn["unfused, waits for counts, 2 GPUs, chilled"] == [(8, 400.0)]
    assert drawn["public FP8 mega-kernel, 8 GPUs, chilled"][-1] == (8192, 3176)
    assert len(drawn) == 4 and len(pro.get_lines()) == 1
    for name in ("a.svg", "b.svg"):
        save(paths, tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    save(paths, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="must end with .svg or .png, got 'a.pdf'"):
        save(paths, tmp_path / "a.pdf")


def test_the_documented_tables_are_those_of_the_results() -> None:
    from ranks_table import BEGIN, DOC, END, results, tables

    assert f"{BEGIN}\n{tables(results())}\n{END}" in DOC.read_text(), "python benchmarks/ranks_table.py --write"
