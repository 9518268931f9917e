"""The bar of long conversions: on a terminal, on the first rank, and not for what is quick."""

from __future__ import annotations

import io
import os
import select
from collections.abc import Iterator
from typing import Any, TextIO

import pytest
import torch.distributed as dist

from megamoe.progress import conversion_bar


class Terminal:
    """A pseudo terminal: `stream` writes to it, `text()` is what it has shown."""

    def __init__(self) -> None:
        self._master, slave = os.openpty()
        self.stream: TextIO = os.fdopen(slave, "w")

    def text(self) -> str:
        self.stream.flush()
        shown = b""
        # what was written comes through in parts, and a moment later
        while select.select([self._master], [], [], 0.5)[0]:
            shown += os.read(self._master, 1 << 16)
        return shown.decode()

    def close(self) -> None:
        self.stream.close()
        os.close(self._master)


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    made = Terminal()
    yield made
    made.close()


def convert(stream: TextIO | None, delay_s: float) -> bool:
    with conversion_bar("packing experts 0..3", 8, stream=stream, delay_s=delay_s) as show:
        for done in range(1, 9):
            if show is not None:
                show(done)
    return show is not None


def test_a_long_conversion_on_a_terminal(terminal: Terminal) -> None:
    assert convert(terminal.stream, 0.0)
    text = terminal.text()
    assert "packing experts 0..3" in text and "8/8" in text


def test_a_quick_conversion_draws_nothing(terminal: Terminal) -> None:
    assert convert(terminal.stream, 60.0) and terminal.text() == ""


def test_a_log_gets_nothing() -> None:
    log = io.StringIO()
    assert not convert(log, 0.0) and log.getvalue() == ""


def test_other_ranks_draw_nothing(terminal: Terminal, monkeypatch: Any) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    for rank in (1, 0):
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        assert convert(terminal.stream, 0.0) == (rank == 0)
        assert ("packing" in terminal.text()) == (rank == 0)
