"""What the engine does when a rank is late, missing, killed or in another call; ranks are processes on shared memory.

Every case ends with the right error on the ranks that live; where all live, `reset()` and a right call follow.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_dist import run_ranks
from helpers_moe import check, local_weights, make_problem, make_tokens

pytest.importorskip("megamoe._host", reason="the C++ engine is not built")

from helpers_engine import ThreadRanks, make_spec

import megamoe.workspace as workspace_module
from megamoe.comm.collectives import Collectives
from megamoe.comm.groups import resolve_group
from megamoe.comm.shm import ShmMemory
from megamoe.errors import ConfigError, MegaMoeError, MegaMoETimeout
from megamoe.kernels.packed import pack_experts
from megamoe.workspace import Workspace

SPEC = make_spec()
OTHER = make_spec(intermediate=64)


def collectives_of_world(timeout_s: float) -> Collectives:
    import torch.distributed as dist

    return Collectives(resolve_group(dist.group.WORLD), torch.device("cpu"), timeout_s)


class Job:
    """One rank's workspace, experts and tokens."""

    def __init__(self, rank: int, world_size: int, timeout_s: float, num_workers: int = 2) -> None:
        self.collectives = collectives_of_world(timeout_s)
        self.workspace = Workspace([SPEC, OTHER], self.collectives, max_tokens_per_rank=64, num_workers=num_workers)
        self.problem = make_problem(SPEC)
        self.experts = pack_experts(local_weights(self.problem, rank, world_size), SPEC)
        self.other = pack_experts(local_weights(make_problem(OTHER), rank, world_size), OTHER)
        self.tokens = make_tokens(SPEC, 20 + rank, seed=rank)

    def call(self, **options: Any) -> None:
        out = torch.full_like(self.tokens[0], float("nan"))
        check(self.problem, self.workspace.run(*self.tokens, self.experts, out=out, **options), *self.tokens)

    def failing_call(self, experts: Any = None, **options: Any) -> tuple[str, str, float, bool]:
        """Return the error's type and text, the seconds it took, and whether the output is all NaN."""
        out = torch.zeros_like(self.tokens[0])
        start = time.monotonic()
        with pytest.raises(MegaMoeError) as caught:
            self.workspace.run(*self.tokens, experts or self.experts, out=out, **options)
        elapsed = time.monotonic() - start
        return type(caught.value).__name__, str(caught.value), elapsed, bool(out.isnan().all())


def run_right(rank: int, world_size: int, arguments: Any) -> str:
    job = Job(rank, world_size, 60)
    for _ in range(3):
        job.call()
    return job.workspace._memory.name


@pytest.mark.parametrize("world_size", [2, 4])
def test_processes_on_shared_memory(world_size: int) -> None:
    assert run_ranks(world_size, "test_engine_faults:run_right") == ["shm"] * world_size
    assert not left_behind()


def left_behind() -> list[str]:
    mine = []
    for path in Path("/dev/shm").glob("megamoe-*"):
        pid = path.name.split("-")[1]
        if not Path(f"/proc/{pid}").exists():
            mine.append(path.name)
    return mine


def run_late(rank: int, world_size: int, arguments: Any) -> None:
    job = Job(rank, world_size, 60)
    if rank == 1:
        time.sleep(4)  # longer than any build
    job.call()


def test_a_late_rank_is_waited_for() -> None:
    """Case C5a."""
    run_ranks(2, "test_engine_faults:run_late")


def run_missing(rank: int, world_size: int, arguments: Any) -> Any:
    job = Job(rank, world_size, 5 if rank != 2 else 60)
    job.collectives.timeout_s = 60
    job.call()
    start = time.monotonic()
    if rank == 2:
        result = None
        while time.monotonic() - start < 7:
            time.sleep(0.1)
        late = job.failing_call()  # the workspace says what happened, without waiting
        assert late[2] < 2
    else:
        result = job.failing_call(timeout_s=5)
        with pytest.raises(MegaMoETimeout, match="rank 2"):
            job.workspace.check()
    job.workspace.reset()
    job.workspace.check()
    for _ in range(3):
        job.call()
    return result


def test_a_missing_rank_is_named_and_reset_mends() -> None:
    """Case C5b: within the timeout + 5 s every live rank raises and names rank 2."""
    results = run_ranks(4, "test_engine_faults:run_missing", timeout_s=120)
    for rank in (0, 1, 3):
        kind, text, elapsed, all_nan = results[rank]
        assert kind == "MegaMoETimeout" and "rank 2" in text and text.startswith("publish"), text
        assert 4.5 < elapsed < 10 and all_nan, (elapsed, all_nan)


def run_killed(rank: int, world_size: int, arguments: Any) -> Any:
    job = Job(rank, world_size, 60)
    if rank == 2:
        # dies at some point of some call
        subprocess.Popen(
            [sys.executable, "-c", f"import os, time; time.sleep(1.0); os.kill({os.getpid()}, {signal.SIGKILL})"]
        )
    while True:
        out = torch.zeros_like(job.tokens[0])
        start = time.monotonic()
        try:
            job.workspace.run(*job.tokens, job.experts, out=out, timeout_s=60)
        except MegaMoETimeout as error:
            elapsed = time.monotonic() - start
            return str(error), elapsed, bool(out.isnan().all()), job.failing_call()[:3]


def test_a_killed_rank_is_noticed_long_before_the_timeout() -> None:
    """Case C5c: the timeout is a minute; the dead process may still be a zombie when the others look."""
    results = run_ranks(4, "test_engine_faults:run_killed", timeout_s=60, may_die=(2,))
    for rank in (0, 1, 3):
        text, elapsed, all_nan, again = results[rank]
        assert "rank 2, whose process has ended" in text and all_nan, text
        assert elapsed < 3, elapsed
        assert again[0] == "MegaMoETimeout" and "rank 2, whose process has ended" in again[1] and again[2] < 1
    assert not left_behind()


def test_which_processes_are_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers in this process's own pid name space; a pid of another one may be anybody's here, or nobody's."""
    pid, namespace = workspace_module._process()
    assert pid == os.getpid() and namespace.startswith("pid:")
    assert workspace_module._watched((pid, namespace)) == 0
    assert workspace_module._watched((pid + 1, namespace)) == pid + 1
    assert workspace_module._watched((pid + 1, "pid:[1]")) == 0

    # without a pidfd, as where a sandbox forbids it, a process counts as gone from when it has been reaped
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    monkeypatch.setattr(workspace_module, "_watched", lambda process: dead.pid)
    ranks = ThreadRanks([SPEC], 2)
    experts, tokens = ranks.pack(make_problem(SPEC)), make_tokens(SPEC, 4)
    start = time.monotonic()
    with pytest.raises(MegaMoETimeout, match="publish: rank 0 waited for rank 1, whose process has ended"):
        ranks.workspaces[0].run(*tokens, experts[0], timeout_s=20)
    assert time.monotonic() - start < 2


def run_interrupted(rank: int, world_size: int, workers: int) -> Any:
    job = Job(rank, world_size, 60, num_workers=workers)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have switched it off
    job.call()
    if rank == 1:
        time.sleep(3)
        result: Any = job.failing_call()
    else:
        threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
        out = torch.zeros_like(job.tokens[0])
        start = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            job.workspace.run(*job.tokens, job.experts, out=out)
        result = time.monotonic() - start, bool(out.isnan().all())
        with pytest.raises(MegaMoETimeout, match="rank 0 stopped because a signal interrupted rank 0"):
            job.workspace.check()
    job.workspace.reset()
    for _ in range(3):
        job.call()
    return result


@pytest.mark.parametrize("workers", [1, 3])
def test_a_signal_ends_a_wait(workers: int) -> None:
    elapsed, all_nan = (results := run_ranks(2, "test_engine_faults:run_interrupted", workers))[0]
    assert 0.9 < elapsed < 2 and all_nan, elapsed
    kind, text, seconds, all_nan = results[1]
    assert kind == "MegaMoETimeout" and "a signal interrupted rank 0" in text and seconds < 1 and all_nan, text


def test_a_signal_ends_a_call_of_which_other_threads_wait() -> None:
    """The peer has published and does no more: one worker waits in combine, and the calling thread for that worker."""
    ranks = ThreadRanks([SPEC], 2, num_workers=8)
    experts = ranks.pack(make_problem(SPEC))
    tokens = [make_tokens(SPEC, 4, seed=rank) for rank in range(2)]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for _ in range(4):  # the waiting worker may be the calling thread itself
        _, (_, error) = ranks.outcomes(
            lambda rank: ranks.workspaces[1].run(*tokens[1], experts[1], timeout_s=0.2) if rank == 1 else None
        )
        assert isinstance(error, MegaMoETimeout)
        ranks.clear(0, "aborts")  # rank 0 is not to know that rank 1 has given up
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        start = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            ranks.workspaces[0].run(*tokens[0], experts[0], timeout_s=20)
        assert time.monotonic() - start < 1.5
        ranks.each(lambda rank: ranks.workspaces[rank].reset())


def run_shapes(rank: int, world_size: int, arguments: Any) -> Any:
    job = Job(rank, world_size, 20)
    result = job.failing_call(job.other if rank == 1 else None)
    job.workspace.reset()
    job.call()
    return result


def test_ranks_in_different_layers() -> None:
    for kind, text, elapsed, all_nan in run_ranks(2, "test_engine_faults:run_shapes"):
        assert kind == "MegaMoeError" and "called different layers" in text and all_nan
        assert "intermediate 64" in text and "intermediate 96" in text, text
        assert elapsed < 10


def run_bounds(rank: int, world_size: int, arguments: Any) -> str:
    bound = 32 if rank == 0 else 64
    with pytest.raises(ConfigError) as caught:
        Workspace([SPEC], collectives_of_world(30), max_tokens_per_rank=bound)
    Workspace([SPEC], collectives_of_world(30), max_tokens_per_rank=64)
    return str(caught.value)


def test_unequal_bounds_raise_at_construction() -> None:
    """Case C4."""
    for text in run_ranks(2, "test_engine_faults:run_bounds"):
        assert "32 tokens on rank 0 and 64 on rank 1" in text


def run_full(rank: int, world_size: int, arguments: Any) -> str:
    collectives = collectives_of_world(30)
    with pytest.raises(MegaMoeError) as caught:
        # far beyond any machine: refused before a page is touched
        ShmMemory(1 << 55 if rank == 1 else 1 << 20, collectives)
    memory = ShmMemory(1 << 20, collectives)
    memory.barrier(30)
    assert len(set(memory.peer_pointers)) == world_size
    memory.close()
    return str(caught.value)


def test_full_shared_memory_is_one_sentence() -> None:
    for text in run_ranks(2, "test_engine_faults:run_full"):
        assert "--shm-size" in text and "rank 1" in text and "\n" not in text
    assert not left_behind()


def test_names_of_dead_processes_are_swept(tmp_path: Path) -> None:
    from megamoe.comm import shm

    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    stale, foreign = tmp_path / f"megamoe-{dead.pid}-00", tmp_path / "other"
    stale.write_bytes(b"x")
    foreign.write_bytes(b"x")
    living = tmp_path / f"megamoe-{os.getpid()}-00"
    living.write_bytes(b"x")
    path, fd = shm._create(tmp_path, 4096)
    os.close(fd)
    assert not stale.exists() and foreign.exists() and living.exists() and path.exists()


def test_concurrent_use_is_refused() -> None:
    ranks = ThreadRanks([SPEC], 2, timeout_s=3)
    experts = ranks.pack(make_problem(SPEC))
    tokens = make_tokens(SPEC, 4)
    first: list[BaseException | None] = []

    def call(rank: int) -> None:
        if rank == 1:
            time.sleep(1)
            with pytest.raises(MegaMoeError, match="another thread is in a call"):
                ranks.workspaces[0].run(*tokens, experts[0])
            return
        try:
            ranks.workspaces[0].run(*tokens, experts[0])
        except MegaMoETimeout as error:
            first.append(error)

    ranks.each(call)
    assert "rank 1" in str(first[0])


@pytest.mark.parametrize("seed", range(3))
def test_reset_after_a_timeout_in_the_middle(seed: int) -> None:
    """Rank 1 stays away for one call; the next calls after `reset()` give the bits of an untroubled run."""
    spec = make_spec(num_experts=9)
    ranks = ThreadRanks([spec], 3, timeout_s=0.5 + 0.1 * seed)
    experts = ranks.pack(make_problem(spec))
    tokens = [make_tokens(spec, 10 + 20 * rank, seed=rank) for rank in range(3)]
    expected = ranks.run(experts, tokens, timeout_s=60)
    _, errors = ranks.outcomes(
        lambda rank: None if rank == 1 else ranks.workspaces[rank].run(*tokens[rank], experts[rank])
    )
    assert errors[1] is None
    for rank in (0, 2):
        assert isinstance(errors[rank], MegaMoETimeout) and "rank 1" in str(errors[rank])
    ranks.each(lambda rank: ranks.workspaces[rank].reset())
    for _ in range(3):
        again = ranks.run(experts, tokens, timeout_s=60)
        assert all(torch.equal(a, b) for a, b in zip(again, expected, strict=True))
