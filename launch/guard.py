"""A worker does not outlive its launcher, however the launcher dies."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

__all__ = ["die_with_parent"]

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_POLL_S = 0.5


def _ask_kernel() -> bool:
    """Ask Linux to kill this process when its parent dies; return False where that is not possible."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        return libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) == 0
    except (OSError, AttributeError):
        return False


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL_S)
    os.kill(os.getpid(), signal.SIGKILL)


def die_with_parent(parent: int | None = None) -> str:
    """Make sure that this process is killed when its parent process dies, also by SIGKILL.

    Call it before anything slow: a parent that died earlier is noticed by comparing process ids.

    Args:
        parent: process id of the parent as the parent itself knows it; None takes the present parent.

    Returns:
        `"kernel"` when the kernel watches, `"thread"` when a thread of this process does.
    """
    expected = os.getppid() if parent is None else parent
    by_kernel = _ask_kernel()
    if os.getppid() != expected:  # it died before the request above, which therefore never fires
        print("megamoe worker: the launcher is gone; stopping", file=sys.stderr)
        os._exit(1)
    if by_kernel:
        return "kernel"
    threading.Thread(target=_watch, args=(expected,), name="megamoe-parent-watch", daemon=True).start()
    return "thread"
