"""What the mega-kernel leaves behind when it is compiled with MEGAMOE_TRACE: events by role, and sums of cycles.

buffer = torch.zeros(trace_bytes(num_ctas), dtype=torch.uint8, device="cuda")
...  # a launch
by_cta = read_trace(buffer)
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

__all__ = ["CYCLE_SUMS", "EVENTS_PER_CTA", "ROLES", "TRACE_EVENT", "CtaTrace", "read_trace", "trace_bytes"]

# TraceEvent of impls/mega_moe/args.cuh; all zeros where nothing was recorded, because an event ends after the epoch
TRACE_EVENT = np.dtype(
    [(name, "<u4") for name in ("role", "phase", "expert", "row_block", "index", "generation")]
    + [("start", "<u8"), ("end", "<u8")]
)
EVENTS_PER_CTA = 1024  # kTraceEvents of the same file
ROLES = ("math", "rows", "scheduler", "pull")  # TraceRole, without the sums
_NUM_SUMS = 8  # kTraceSums of the same file: the last entries of a CTA
# what the CycleScopes of prefill.cuh and expanded.cuh count, all in the first math thread
CYCLE_SUMS = {0: "waits_of_math", 6: "epilogues"}

Event = tuple[int, int, int, int, int, int, int, int]


@dataclass
class CtaTrace:
    """One CTA in one call.

    Attributes:
        cta: its number.
        events: (role, phase, expert, row block, index, generation, start ns, end ns) of each, by their start.
        start: of the CTA, ns of the GPU's clock; None where the CTA has not come to its end.
        cycles: sums by name, those that are not zero.
        dropped: events that found no room: the last ones.
    """

    cta: int
    events: list[Event]
    start: int | None = None
    cycles: dict[str, int] = field(default_factory=dict)
    dropped: int = 0


def trace_bytes(num_ctas: int) -> int:
    """Return the bytes of the buffer for a launch of that many CTAs."""
    return num_ctas * EVENTS_PER_CTA * TRACE_EVENT.itemsize


def read_trace(buffer: Tensor) -> list[CtaTrace]:
    """Return what every CTA has recorded. Waits for the current stream.

    Args:
        buffer: uint8 `[trace_bytes(num_ctas)]`, zeroed before the launch.
    """
    slots = buffer.cpu().numpy().view(TRACE_EVENT).reshape(-1, EVENTS_PER_CTA)
    found = []
    for cta, row in enumerate(slots):
        events, sums = (part[part["end"] != 0] for part in (row[:-_NUM_SUMS], row[-_NUM_SUMS:]))
        trace = CtaTrace(cta, events[np.argsort(events["start"], kind="stable")].tolist())
        if len(sums):
            trace.start = int(sums["start"][0])
            trace.dropped = int(sums["index"][0]) - len(events)
        for number, cycles in zip(sums["phase"].tolist(), (sums["end"] - sums["start"]).tolist(), strict=True):
            if cycles:
                trace.cycles[CYCLE_SUMS.get(number, f"sum_{number}")] = cycles
        found.append(trace)
    return found
