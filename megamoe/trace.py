"""A trace of every task of the C++ engine or the mega-kernel, in the Chrome format (chrome://tracing, ui.perfetto.dev).

`MEGAMOE_TRACE=file.json` switches it on. Every rank writes a file of its own: rank 0 `file.json`, rank 1 `file.1.json`,
and so on, ranks of torch.distributed's default group; processes are ranks in each, so the files can be loaded together.
Threads are workers of the engine, or the roles of every CTA. Times are microseconds since a power of two nanoseconds
that ranks share; clocks of GPUs differ a little. `megamoe trace file.json` prints sums.
"""

from __future__ import annotations

import atexit
import itertools
import json
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from megamoe import env
from megamoe.errors import ConfigError

__all__ = ["Trace"]

_PHASES = ("publish", "pull", "l1", "l2", "combine", "end", "expand")  # Phase of scheduler/task.h
_ROLES = ("math", "rows", "scheduler", "pull")  # TraceRole of impls/mega_moe/args.cuh
_LANES = ("cta", *_ROLES)  # threads of a CTA in the trace
# A viewer holds a time in a double: 2^50 ns (13 days) still leave it a fraction of a nanosecond, the epoch does not.
_PERIOD_NS = 1 << 50


class Trace:
    """Collects events and writes them when the process ends or `write` is called.

    Args:
        path: the file to write.
        rank: the process of the trace.
    """

    _of_process: ClassVar[dict[Path, Trace]] = {}

    def __init__(self, path: Path, rank: int) -> None:
        self.path = path
        self.rank = rank
        self._events: list[dict[str, Any]] = []
        self._lanes: dict[int, str] = {}
        self._calls = itertools.count()
        self._dropped = 0
        atexit.register(self.write)

    @classmethod
    def from_environment(cls, rank: int) -> Trace | None:
        """Return the trace that MEGAMOE_TRACE asks for, one for all workspaces of a process, or None.

        Raises:
            ConfigError: the file could not be written when the process ends.
        """
        name = env.value("MEGAMOE_TRACE")
        if not name:
            return None
        path = Path(name)
        path = path if rank == 0 else path.with_suffix(f".{rank}{path.suffix}")
        if path not in cls._of_process:
            _require_writable(path)
            cls._of_process[path] = cls(path, rank)
        return cls._of_process[path]

    def add(self, events: Iterable[tuple[int, ...]]) -> None:
        """Take tasks of one call: (worker, generation, ticket, phase, expert, row block, index, start ns, end ns)."""
        call = self.new_call()
        for worker, generation, ticket, phase, expert, row_block, index, start, end in events:
            place = {"call": call, "generation": generation, "ticket": ticket}
            place |= {"expert": expert, "row_block": row_block, "index": index}
            self._append(_PHASES[phase], "worker", worker, start, end, place)

    def new_call(self) -> int:
        """Return a number for one call of this process, in its events' args."""
        return next(self._calls)

    def add_cta(
        self,
        call: int,
        cta: int,
        events: Sequence[tuple[int, ...]],
        *,
        start: int | None = None,
        cycles: Mapping[str, int] | None = None,
        dropped: int = 0,
    ) -> None:
        """Take what one CTA of the mega-kernel did in a call.

        Args:
            call: of `new_call()`.
            cta: its number.
            events: (role, phase, expert, row block, index, generation, start ns, end ns) of each.
            start: of the CTA, ns of the same clock; with it the CTA has an event of its own that ends with the last of
                the others, and that holds the sums.
            cycles: sums of cycles, by name.
            dropped: events that found no room.
        """
        first = cta * len(_LANES)
        for role, phase, expert, row_block, index, generation, begin, end in events:
            name = _PHASES[phase]
            if _ROLES[role] == "scheduler":
                name = f"claim c{index}"
            elif name in ("publish", "combine"):
                name += f" c{index}"
            elif name == "expand":  # of weights: it has no rows
                name += f" e{expert} c{index}"
            else:
                name += f" e{expert} b{row_block} c{index}"
            place = {"call": call, "generation": generation}
            place |= {"expert": expert, "row_block": row_block, "index": index}
            self._append(name, _ROLES[role], first + 1 + role, begin, end, place)
        if start is not None:
            place = {"call": call, **(cycles or {})}
            self._append("call", "cta", first, start, max((event[7] for event in events), default=start), place)
        for lane, role_name in enumerate(_LANES):
            self._lanes.setdefault(first + lane, f"CTA {cta}" if lane == 0 else f"CTA {cta} {role_name}")
        if dropped and not self._dropped:
            warnings.warn(
                f"MEGAMOE_TRACE: CTA {cta} had more events than its buffer holds; its last ones are missing",
                stacklevel=2,
            )
        self._dropped += dropped

    def write(self) -> None:
        """Write what has been collected so far."""
        if not self._events:
            return
        names = [
            {"name": kind, "ph": "M", "pid": self.rank, "tid": lane, "args": value}
            for lane, text in sorted(self._lanes.items())
            for kind, value in (("thread_name", {"name": text}), ("thread_sort_index", {"sort_index": lane}))
        ]
        content = {
            "traceEvents": names + self._events,
            "displayTimeUnit": "ns",
            "otherData": {"dropped_events": self._dropped},
        }
        self.path.write_text(json.dumps(content))

    def _append(self, name: str, category: str, thread: int, start: int, end: int, place: dict[str, int]) -> None:
        self._events.append(
            {
                "name": name,
                "cat": category,
                "ph": "X",
                "pid": self.rank,
                "tid": thread,
                "ts": start % _PERIOD_NS / 1000,
                "dur": (end - start) / 1000,
                "args": place,
            }
        )


def _require_writable(path: Path) -> None:
    folder = path.resolve().parent
    if path.is_dir():
        raise ConfigError(f"MEGAMOE_TRACE: {path} is a folder; name a file")
    if not folder.is_dir():
        raise ConfigError(f"MEGAMOE_TRACE: there is no folder {folder} for {path.name}; make it")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise ConfigError(f"MEGAMOE_TRACE: {path} cannot be written; name a file that can")
