"""Exit codes by which the ranks tell the launcher what happened."""

from __future__ import annotations

__all__ = ["BROKEN", "FAILED", "LOST_PEER", "REFUSED", "SAID"]

FAILED = 1  # the job ran and its check failed
REFUSED = 2  # the request cannot work
BROKEN = 3  # an error nobody foresaw; a traceback is on stderr
LOST_PEER = 4  # another rank went away: a consequence, never the cause

SAID = (FAILED, REFUSED, BROKEN)  # after these the rank has printed what there is to say
