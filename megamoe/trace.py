"""A trace of every task of the engine in the Chrome format (chrome://tracing, ui.perfetto.dev).

`MEGAMOE_TRACE=file.json` switches it on. Every rank writes a file of its own: rank 0 `file.json`, rank 1 `file.1.json`,
and so on; processes are ranks and threads are workers in each, so the files can be loaded together.
"""

from __future__ import annotations

import atexit
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megamoe import env

__all__ = ["Trace"]

_PHASES = ("publish", "pull", "l1", "l2", "combine")


class Trace:
    """Collects events and writes them when the process ends or `write` is called.

    Args:
        path: the file to write.
        rank: the process of the trace.
    """

    def __init__(self, path: Path, rank: int) -> None:
        self.path = path
        self.rank = rank
        self._events: list[dict[str, Any]] = []
        atexit.register(self.write)

    @classmethod
    def from_environment(cls, rank: int) -> Trace | None:
        """Return a trace where MEGAMOE_TRACE asks for one."""
        name = env.value("MEGAMOE_TRACE")
        if not name:
            return None
        path = Path(name)
        return cls(path if rank == 0 else path.with_suffix(f".{rank}{path.suffix}"), rank)

    def add(self, events: Iterable[tuple[int, ...]]) -> None:
        """Take tasks: (worker, generation, ticket, phase, expert, row block, index, start ns, end ns) of each."""
        for worker, generation, ticket, phase, expert, row_block, index, start, end in events:
            self._events.append(
                {
                    "name": _PHASES[phase],
                    "ph": "X",
                    "pid": self.rank,
                    "tid": worker,
                    "ts": start / 1000,
                    "dur": (end - start) / 1000,
                    "args": {
                        "generation": generation,
                        "ticket": ticket,
                        "expert": expert,
                        "row_block": row_block,
                        "index": index,
                    },
                }
            )

    def write(self) -> None:
        """Write what has been collected so far."""
        if self._events:
            self.path.write_text(json.dumps({"traceEvents": self._events, "displayTimeUnit": "ns"}))
