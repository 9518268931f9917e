"""The trace holds every ticket once, and no worker, and no role of a CTA, does two things at a time."""

from __future__ import annotations

import json
import struct
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_moe import make_problem, make_tokens

host = pytest.importorskip("megamoe._host", reason="the C++ engine is not built")

from helpers_engine import ThreadRanks, make_spec  # noqa: E402
from helpers_mega import (  # noqa: E402
    FakeGpu,
    FakePlan,
    gpu_problem,
    gpu_tokens,
    launch,
    make_workspace,
    mega_spec,
    record_launches,
    same_bits,
)

import megamoe.device_workspace as device_workspace  # noqa: E402
from megamoe.cli import main  # noqa: E402
from megamoe.comm.collectives import Collectives  # noqa: E402
from megamoe.comm.groups import RankGroup  # noqa: E402
from megamoe.device_workspace import DeviceWorkspace  # noqa: E402
from megamoe.errors import ConfigError, MegaMoeError  # noqa: E402
from megamoe.functional import MoEContext  # noqa: E402
from megamoe.kernels.mega_moe import INSTANCES, mega_moe_sources  # noqa: E402
from megamoe.kernels.mega_trace import read_trace, trace_bytes  # noqa: E402
from megamoe.trace_report import read_events, report  # noqa: E402

PHASES = ("publish", "pull", "l1", "l2", "combine")
Spans = list[tuple[float, float]]


def read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def overlaps(spans: Spans) -> bool:
    spans = sorted(spans)
    return any(a[1] > b[0] + 1e-3 for a, b in zip(spans, spans[1:], strict=False))


def by_thread(events: Sequence[dict[str, Any]], width: int = 1) -> dict[int, Spans]:
    """Return [start, end] of the events of every thread; of `width` neighbouring ones together."""
    found: dict[int, Spans] = defaultdict(list)
    for event in events:
        found[event["tid"] // width].append((event["ts"], event["ts"] + event["dur"]))
    return found


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
        for event in events:
            assert event["ph"] == "X" and event["pid"] == rank
            tickets[event["args"]["generation"]].append(event["args"]["ticket"])
        assert len(tickets) == 2 * 3  # two calls of three chunks
        for seen in tickets.values():
            assert sorted(seen) == list(range(len(seen)))
        assert {event["name"] for event in events} == {"publish", "pull", "l1", "l2", "combine"}
        assert not any(overlaps(spans) for spans in by_thread(events).values())
    lengths = [len(json.loads(path.read_text())["traceEvents"]) for path in tmp_path.glob("*.json")]
    print(f"{sum(lengths)} events")
    said = report(sorted(tmp_path.glob("*.json")))
    counts = Counter(event["name"] for path in tmp_path.glob("*.json") for event in read(path)["traceEvents"])
    table = [line.split() for line in said.splitlines()[2:]]
    assert [row[:3] for row in table] == [[name, "worker", str(counts[name])] for name in PHASES]


def test_no_trace_unless_asked_for() -> None:
    assert ThreadRanks([make_spec()], 1).workspaces[0]._trace is None


# ---- the mega-kernel ------------------------------------------------------------------------------------------------

MATH, ROWS, SCHEDULER, PULL, CYCLES = range(5)
NOW = 1_790_000_000_123_456_789  # ns since the epoch, as a GPU's clock has them
CAPACITY = 1024


def event(role: int, phase: int, place: tuple[int, int, int], start: int, end: int, generation: int = 1) -> bytes:
    """Return a TraceEvent of impls/mega_moe/args.cuh; `place`: expert, row block, index."""
    return struct.pack("<6I2Q", role, phase, *place, generation, NOW + start, NOW + end)


def whole(events: list[bytes], start: int, cycles: dict[int, int]) -> list[bytes]:
    """Return what a CTA leaves that had these events: as many as there is room for, and its sums at the end."""
    kept = events[: CAPACITY - 8]
    gap = [b"\0" * 40] * (CAPACITY - 8 - len(kept))
    place = (0, 0, len(events))
    return kept + gap + [event(CYCLES, i, place, start, start + cycles.get(i, 0), 0) for i in range(8)]


def one_cta(start: int, expert: int, generation: int = 1) -> list[bytes]:
    """Return what a CTA may leave, in the order in which its roles end."""
    events = [
        event(SCHEDULER, 0, (0, 0, 0), start + 10, start + 90, generation),
        event(MATH, 0, (0, 0, 4), start + 100, start + 1100, generation),
        event(SCHEDULER, 0, (0, 0, 1), start + 112, start + 500, generation),
        event(PULL, 1, (expert, 7, 2), start + 500, start + 700, generation),
        event(ROWS, 2, (expert, 7, 2), start + 1000, start + 1200, generation),
        event(MATH, 2, (expert, 7, 2), start + 1100, start + 3100, generation),
        event(MATH, 3, (expert, 7, 5), start + 3100, start + 4601, generation),
    ]
    return whole(events, start, {0: 700, 6: 300})


def buffer_of(ctas: Sequence[Sequence[bytes]]) -> torch.Tensor:
    """Return a buffer as a launch leaves it."""
    data = b"".join(b"".join(events).ljust(40 * CAPACITY, b"\0") for events in ctas)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


class RecordingPlan(FakePlan):
    """A launch that leaves `recorded` in the buffer of the workspace."""

    recorded: torch.Tensor

    def launch(self, *arguments: Any, **options: Any) -> None:
        super().launch(*arguments, **options)
        buffer = self.options["trace"]
        assert not buffer.any(), "the kernel finds events of the call before"
        buffer.copy_(RecordingPlan.recorded)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeGpu:
    monkeypatch.setenv("MEGAMOE_TRACE", str(tmp_path / "mega.json"))
    gpu = record_launches(monkeypatch)
    monkeypatch.setattr(device_workspace, "MegaMoePlan", RecordingPlan)
    return gpu


def run(workspace: DeviceWorkspace, *calls: torch.Tensor) -> None:
    plan = workspace.plan(mega_spec(), None)  # type: ignore[arg-type]
    x, ids, weights = make_tokens(mega_spec(), 4, dtype=torch.bfloat16)
    for recorded in calls:
        RecordingPlan.recorded = recorded
        workspace.launch(plan, x, ids, weights, torch.empty_like(x))


def written(workspace: DeviceWorkspace) -> dict[str, Any]:
    assert workspace._trace is not None
    workspace._trace.write()
    return read(workspace._trace.path)


def tasks_of(content: dict[str, Any]) -> list[dict[str, Any]]:
    return [event for event in content["traceEvents"] if event["ph"] == "X"]


def test_events_of_the_mega_kernel(gpu: FakeGpu) -> None:
    workspace = make_workspace([mega_spec()])
    first = buffer_of([one_cta(0, expert=3), one_cta(40, expert=5)])
    second = buffer_of([one_cta(9000, 1, generation=2), one_cta(9001, 2, generation=2)])
    run(workspace, first, second)
    assert gpu.loaded_traced
    content = written(workspace)
    tasks = tasks_of(content)
    assert len(tasks) == 2 * 2 * (7 + 1) and all(event["pid"] == 0 for event in tasks)
    assert content["otherData"] == {"dropped_events": 0}
    assert [event["name"] for event in tasks[:8]] == [
        *("claim c0", "publish c4", "claim c1", "pull e3 b7 c2", "l1 e3 b7 c2", "l1 e3 b7 c2", "l2 e3 b7 c5", "call")
    ]
    assert [event["cat"] for event in tasks[:8]] == [
        *("scheduler", "math", "scheduler", "pull", "rows", "math", "math", "cta")
    ]
    assert tasks[6]["args"] == {"call": 0, "generation": 1, "expert": 3, "row_block": 7, "index": 5}
    assert tasks[7]["args"] == {"call": 0, "waits_of_math": 700, "epilogues": 300}
    assert {(event["args"]["call"], event["args"].get("generation", 0)) for event in tasks} == {
        *((0, 1), (1, 2), (0, 0), (1, 0))
    }
    # nanoseconds survive: a time since the epoch would be rounded to 250 of them
    starts = [round((event["ts"] - tasks[7]["ts"]) * 1000) for event in tasks[:8]]
    assert starts == [10, 100, 112, 500, 1000, 1100, 3100, 0]
    assert [round(event["dur"] * 1000) for event in tasks[:8]] == [80, 1000, 388, 200, 200, 2000, 1501, 4601]
    # one thread a role; a CTA as a whole does several things at a time
    assert not any(overlaps(spans) for spans in by_thread(tasks).values())
    assert all(overlaps(spans) for spans in by_thread(tasks, width=5).values())
    names = {e["tid"]: e["args"]["name"] for e in content["traceEvents"] if e["name"] == "thread_name"}
    assert {event["tid"] for event in tasks} <= set(names)
    assert names[tasks[6]["tid"]] == "CTA 0 math" and names[tasks[-1]["tid"]] == "CTA 1"


def test_a_buffer_that_is_too_small_is_told(gpu: FakeGpu, tmp_path: Path) -> None:
    def math(count: int) -> list[bytes]:
        return [event(MATH, 3, (0, 0, i), 10 * i + 1, 10 * i + 11) for i in range(count)]

    room = CAPACITY - 8
    for count in (0, 5, room, room + 1, room + 900):
        found = read_trace(buffer_of([whole(math(count), 0, {6: 5})]))[0]
        assert (found.start, found.cycles, len(found.events)) == (NOW, {"epilogues": 5}, min(count, room))
        assert found.dropped == max(0, count - room)
    unfinished = read_trace(buffer_of([math(3)]))[0]
    assert (unfinished.dropped, unfinished.start, len(unfinished.events)) == (0, None, 3)

    workspace = make_workspace([mega_spec()])
    crowded = buffer_of([one_cta(0, 1), whole(math(room + 8), 0, {})])
    with pytest.warns(UserWarning, match="CTA 1 had more events than its buffer holds") as told:
        run(workspace, crowded, crowded)
    assert len(told) == 1
    assert written(workspace)["otherData"] == {"dropped_events": 16}
    assert "\n16 events found no room" in report([tmp_path / "mega.json"])


@pytest.mark.parametrize("make", [make_workspace, lambda specs: ThreadRanks([make_spec()], 1)], ids=["gpu", "cpu"])
def test_a_file_that_cannot_be_written_is_told_at_once(
    make: Any, gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "folder.json").mkdir()
    for name, reason in (
        ("none/a.json", "MEGAMOE_TRACE: there is no folder .*none for a.json; make it"),
        ("folder.json", "MEGAMOE_TRACE: .*folder.json is a folder; name a file"),
    ):
        monkeypatch.setenv("MEGAMOE_TRACE", str(tmp_path / name))
        with pytest.raises(ConfigError, match=reason):
            make([mega_spec()])


def test_one_buffer_serves_every_plan(gpu: FakeGpu) -> None:
    workspace = make_workspace([mega_spec()], num_sms=1)
    plans = [workspace.plan(mega_spec(), None) for _ in range(2)]  # type: ignore[arg-type]
    buffers = [plan.options["trace"] for plan in plans]  # type: ignore[attr-defined]
    assert buffers[0] is buffers[1] and buffers[0].numel() == trace_bytes(1) == 40 * CAPACITY


def test_a_traced_call_is_not_captured(gpu: FakeGpu) -> None:
    workspace = make_workspace([mega_spec()])
    gpu.capture = 7
    with pytest.raises(MegaMoeError, match="^MEGAMOE_TRACE: .*none can be captured in a graph; capture without it$"):
        run(workspace, buffer_of([[], []]))
    assert not FakePlan.launches
    gpu.capture = 0
    run(workspace, buffer_of([one_cta(0, 1), []]))
    assert len(FakePlan.launches) == 1


def test_a_group_writes_under_its_global_ranks(gpu: FakeGpu, tmp_path: Path) -> None:
    collectives = Collectives(RankGroup(None, 0, 1, (5,)), torch.device("cpu"), 3.0)
    workspaces = [DeviceWorkspace([mega_spec()], collectives, max_tokens_per_rank=8) for _ in range(2)]
    for workspace in workspaces:  # two in one process: one file
        run(workspace, buffer_of([one_cta(0, 1), []]))
    content = written(workspaces[0])
    assert workspaces[1]._trace is workspaces[0]._trace and workspaces[0]._trace.path == tmp_path / "mega.5.json"
    assert {(event["pid"], event["args"]["call"]) for event in tasks_of(content)} == {(5, 0), (5, 1)}


def test_the_normal_kernel_knows_nothing_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = record_launches(monkeypatch)
    workspace = make_workspace([mega_spec()])
    plan: Any = workspace.plan(mega_spec(), None)  # type: ignore[arg-type]
    assert plan.options["trace"] is None and not gpu.loaded_traced
    for normal, traced in zip(mega_moe_sources(), mega_moe_sources(traced=True), strict=True):
        assert "TRACE" not in normal.code.upper() and traced.code.startswith("#define MEGAMOE_TRACE\n")
        assert (traced.name, traced.entry) == (f"{normal.name}_trace", f"{normal.entry}_trace")
        assert normal.key((), "") != traced.key((), "")
    for normal, slow in zip(mega_moe_sources(), mega_moe_sources(throttle_gbps=400), strict=True):
        assert "THROTTLE" not in normal.code and slow.code.startswith("#define MEGAMOE_THROTTLE_GBPS 400\n")
        assert slow.name == f"{normal.name}_400gbps" and normal.key((), "") != slow.key((), "")


# ---- megamoe trace --------------------------------------------------------------------------------------------------


def test_report(gpu: FakeGpu, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    workspace = make_workspace([mega_spec()])
    run(workspace, buffer_of([one_cta(0, 3), one_cta(40, 5)]), buffer_of([one_cta(9000, 3), []]))
    written(workspace)
    path = str(tmp_path / "mega.json")
    assert main(["trace", path]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "events: 24, calls: 2, ranks: 1; us from the call's start"
    assert lines[1].split() == ["phase", "role", "count", "first", "start", "last", "end", "median", "max"]
    assert [line.split() for line in lines[2:9]] == [
        ["publish", "math", "3", "0.10", "1.14", "1.00", "1.00"],
        ["claim", "scheduler", "6", "0.01", "0.54", "0.23", "0.39"],
        ["pull", "pull", "3", "0.50", "0.74", "0.20", "0.20"],
        ["l1", "rows", "3", "1.00", "1.24", "0.20", "0.20"],
        ["l1", "math", "3", "1.10", "3.14", "2.00", "2.00"],
        ["l2", "math", "3", "3.10", "4.64", "1.50", "1.50"],
        ["call", "cta", "3", "0.00", "4.64", "4.60", "4.60"],
    ]
    assert lines[9:] == [
        "cycles of a CTA in epilogues: median 300, max 300, of 3",
        "cycles of a CTA in waits_of_math: median 700, max 700, of 3",
    ]
    assert main(["trace", path, "--call", "1"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "events: 8, calls: 1, ranks: 1; us from the call's start"


def test_weights_that_are_expanded_have_their_own_phase(gpu: FakeGpu, tmp_path: Path) -> None:
    """Every phase of the schedule has its name, and the report puts them in the order of a call."""
    workspace = make_workspace([mega_spec()])
    phases = [number for number, name in enumerate(host.PHASES) if name != "end"]
    events = [event(MATH, phase, (3, 7, 2), 100 * i + 1, 100 * i + 51) for i, phase in enumerate(phases)]
    run(workspace, buffer_of([whole(events, 0, {}), []]))
    names = [found["name"] for found in tasks_of(written(workspace)) if found["cat"] == "math"]
    assert [name.split()[0] for name in names] == [host.PHASES[phase] for phase in phases]
    assert names[-1] == "expand e3 c2"
    said = report([tmp_path / "mega.json"]).splitlines()[2:]
    assert [line.split()[0] for line in said] == ["publish", "pull", "expand", "l1", "l2", "combine", "call"]


def test_report_refuses_in_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other.json"
    good = tmp_path / "good.json"
    task = {"name": "l1", "cat": "math", "ph": "X", "pid": 0, "tid": 0, "ts": 0, "dur": 1, "args": {"call": 2}}
    good.write_text(json.dumps({"traceEvents": [task], "otherData": {"dropped_events": 0}}))
    cases = [
        (None, [], "other.json: No such file or directory"),
        ("ab", [], "not JSON"),
        ("[]", [], "not a trace that MEGAMOE_TRACE has written"),
        (json.dumps({"traceEvents": [task | {"name": "x"}]}), [], "not a trace that MEGAMOE_TRACE has written"),
        (json.dumps({"traceEvents": [], "otherData": {"dropped_events": 0}}), [], "holds no events"),
        (good.read_text(), ["--call", "3"], "--call 3: the trace has calls 2 to 2"),
        (good.read_text(), ["--plot", str(tmp_path / "a.jpg")], "the name must end in .png"),
        (good.read_text(), ["--plot", str(tmp_path / "a.png"), "--call", "3"], "the trace has calls 2 to 2"),
    ]
    # right names, wrong types
    for wrong in (
        {"ts": "0"},
        {"dur": None},
        {"ts": float("nan")},
        {"pid": [0]},
        {"args": {"call": "2"}},
        {"args": 5},
        {"args": {"call": 2, "epilogues": "many"}},
        {"name": 7},
        {"cat": {}},
    ):
        content = {"traceEvents": [task | wrong], "otherData": {"dropped_events": 0}}
        cases.append((json.dumps(content), [], "not a trace that MEGAMOE_TRACE has written"))
    for content in (
        {"traceEvents": 3},
        {"traceEvents": [task], "otherData": {"dropped_events": "1"}},
        {"traceEvents": [3]},
    ):
        cases.append((json.dumps(content), [], "not a trace that MEGAMOE_TRACE has written"))
    cases.append(("[" * 100_000, [], "not JSON"))
    for text, options, reason in cases:
        if text is not None:
            other.write_text(text)
        assert main(["trace", str(other), *options]) == 2
        said = capsys.readouterr().err
        assert reason in said and said.count("\n") == 1, said


def test_the_picture_counts_who_is_at_work(gpu: FakeGpu, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="pip install 'megamoe[plot]'")
    from megamoe.launch.trace_plot import trace_figure

    workspace = make_workspace([mega_spec()])
    run(workspace, buffer_of([one_cta(0, 3), one_cta(1000, 5)]), buffer_of([one_cta(9000, 3), []]))
    written(workspace)
    events, _ = read_events(tmp_path / "mega.json")
    events = [event for event in events if event["args"]["call"] == 0]
    max((event for event in events if event["cat"] == "pull"), key=lambda event: event["ts"])["cat"] = "math"
    last = max((event for event in events if event["name"].startswith("l2")), key=lambda event: event["ts"])
    last["name"] = "expand e5 c5"
    tasks, pulls = trace_figure(events, "a title").axes

    def heights(collection: Any, at: float) -> float:
        """Height of the area at a time, us: top minus bottom of its outline there."""
        points = collection.get_paths()[0].vertices
        there = [y for x, y in points if abs(x - at) < 0.02]
        return float(max(there) - min(there))

    # l1 of the first CTA goes from 1.1 to 3.1 us, of the second from 2.1 to 4.1; pulls from 0.5 to 0.7, and by math
    # warps from 1.5 to 1.7; l2 of the first from 3.1 to 4.6, and from 4.1 to 5.6 the second expands weights
    by_math, expand, l1, l2 = tasks.collections[1:5]
    assert [heights(by_math, at) for at in (0.6, 1.6)] == [0, 1]
    assert [heights(expand, at) for at in (3.5, 4.3, 5.0)] == [0, 1, 1]
    assert [heights(l2, at) for at in (3.0, 3.5, 4.3, 5.0)] == [0, 1, 1, 0]
    assert [heights(l1, at) for at in (0.5, 1.8, 2.5, 3.5, 4.5)] == [0, 1, 2, 1, 0]
    assert [heights(pulls.collections[0], at) for at in (0.6, 1.1, 1.6)] == [1, 0, 1]
    target = tmp_path / "picture.png"
    assert main(["trace", str(tmp_path / "mega.json"), "--plot", str(target), "--call", "1"]) == 0
    assert target.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and capsys.readouterr().out == ""


# ---- on a GPU -------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("name", INSTANCES)
def test_a_traced_launch(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits as without a trace, every task of the schedule once, and no role does two things at a time."""
    spec = mega_spec(hidden=512, intermediate=256)
    experts = gpu_problem(spec).weights
    tokens = gpu_tokens(spec, 300)
    device = torch.device("cuda", torch.cuda.current_device())
    options: dict[str, Any] = dict(device=device, max_tokens_per_rank=1024)
    plain = launch(MoEContext(spec, None, "sm90", **options), tokens, experts, name)
    monkeypatch.setenv("MEGAMOE_TRACE", str(tmp_path / "gpu.json"))
    collectives = Collectives(RankGroup(None, 0, 1, (0,)), device, 60.0)
    workspace = DeviceWorkspace([spec], collectives, max_tokens_per_rank=1024)
    context = MoEContext(spec, None, "sm90", workspace=workspace, **options)
    for _ in range(2):
        assert same_bits(launch(context, tokens, experts, name), plain)
    workspace.check()
    content = written(workspace)
    tasks = tasks_of(content)
    assert content["otherData"] == {"dropped_events": 0}
    instance = INSTANCES[name]
    blocks = sum(-(-rows // instance.block_rows) for rows in torch.bincount(tokens[1].flatten()).tolist())
    columns = {"l1": -(-spec.intermediate // 128), "l2": -(-spec.hidden // instance.l2_columns)}
    for call in range(2):
        own = [event for event in tasks if event["args"]["call"] == call]
        for phase, count in columns.items():
            math = [e["args"] for e in own if e["cat"] == "math" and e["name"].split()[0] == phase]
            found = sorted((args["row_block"], args["index"]) for args in math)
            assert found == [(block, column) for block in range(blocks) for column in range(count)]
        by_math = {e["name"].split()[0] for e in own if e["cat"] == "math"}
        assert {"publish", "combine"} <= by_math and ("expand" in by_math) == (name == "expanded")
        pulled = sorted((e["args"]["row_block"], e["args"]["index"]) for e in own if e["name"].split()[0] == "pull")
        assert pulled == [(block, part) for block in range(blocks) for part in range(instance.pulls_per_block)]
        assert sum(e["cat"] == "cta" for e in own) == torch.cuda.get_device_properties(device).multi_processor_count
    assert not any(overlaps(spans) for spans in by_thread(tasks).values())
    assert all(event["dur"] >= 0 for event in tasks)
    print(report([tmp_path / "gpu.json"]))
