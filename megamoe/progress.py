"""A progress bar for conversions that take long. It is drawn on a terminal only, and by one rank only."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

__all__ = ["conversion_bar"]

_DELAY_S = 1.0


@contextmanager
def conversion_bar(
    label: str, total: int, *, stream: TextIO | None = None, delay_s: float = _DELAY_S
) -> Iterator[Callable[[int], None] | None]:
    """Show how far a conversion is, from the moment that it has taken `delay_s` seconds; the bar goes when it ends.

    Args:
        label: what is converted.
        total: steps in all.
        stream: where to draw; None = stderr.
        delay_s: a conversion that ends sooner draws nothing.

    Yields:
        a function that takes the number of steps done; None where nobody would see a bar: no terminal, or not rank 0.
    """
    stream = sys.stderr if stream is None else stream
    if not stream.isatty() or not _is_first_rank():
        yield None
        return
    start = time.monotonic()
    bar: Any = None
    task: Any = None

    def show(done: int) -> None:
        nonlocal bar, task
        if bar is None:
            if done >= total or time.monotonic() - start < delay_s:
                return
            # imported only where a bar is drawn
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            bar = Progress(*columns, console=Console(file=stream), transient=True)
            bar.start()
            task = bar.add_task(label, total=total)
        bar.update(task, completed=done)

    try:
        yield show
    finally:
        if bar is not None:
            bar.stop()


def _is_first_rank() -> bool:
    import torch.distributed as dist

    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0
