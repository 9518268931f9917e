"""The trace holds every ticket once, and no worker does two things at a time."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import pytest
from helpers_moe import make_problem, make_tokens

host = pytest.importorskip("megamoe._host", reason="the C++ engine is not built")

from helpers_engine import ThreadRanks, make_spec  # noqa: E402


@pytest.mark.parametrize("world_size", [1, 2])
def test_every_ticket_once(world_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGAMOE_TRACE", str(tmp_path / "trace.json"))
    spec = make_spec(num_experts=4)
    ranks = ThreadRanks([spec], world_size, max_tokens=64, num_workers=3)
    experts = ranks.pack(make_problem(spec))
    counts = [150, 5][:world_size]  # several generations
    tokens = [make_tokens(spec, count, seed=rank) for rank, count in enumerate(counts)]
    for _ in range(2):
        ranks.run(experts, tokens)
    for rank in range(world_size):
        trace = ranks.workspaces[rank]._trace
        assert trace is not None
        trace.write()
        name = "trace.json" if rank == 0 else f"trace.{rank}.json"
        events = json.loads((tmp_path / name).read_text())["traceEvents"]
        tickets = defaultdict(list)
        workers = defaultdict(list)
        for event in events:
            assert event["ph"] == "X" and event["pid"] == rank
            tickets[event["args"]["generation"]].append(event["args"]["ticket"])
            workers[event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
        assert len(tickets) == 2 * 3  # two calls of three chunks
        for seen in tickets.values():
            assert sorted(seen) == list(range(len(seen)))
        assert {event["name"] for event in events} == {"publish", "pull", "l1", "l2", "combine"}
        for spans in workers.values():
            spans.sort()
            assert all(a[1] <= b[0] + 1e-3 for a, b in zip(spans, spans[1:], strict=False))
    lengths = [len(json.loads(path.read_text())["traceEvents"]) for path in tmp_path.glob("*.json")]
    print(f"{sum(lengths)} events")


def test_no_trace_unless_asked_for() -> None:
    assert ThreadRanks([make_spec()], 1).workspaces[0]._trace is None
