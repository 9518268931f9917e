"""The errors that megamoe raises itself. Wrong arguments raise `ValueError` or `TypeError` as usual."""

from __future__ import annotations

__all__ = ["BackendUnavailable", "ConfigError", "MegaMoETimeout", "MegaMoeError"]


class MegaMoeError(RuntimeError):
    """Base class: hardware, build, transport or configuration made the request impossible."""


class ConfigError(MegaMoeError, ValueError):
    """A configuration that cannot work; the message names file, key, rule and the nearest valid choice."""


class BackendUnavailable(MegaMoeError):
    """A backend was asked for by name and cannot run here; the message says why."""


class MegaMoETimeout(MegaMoeError):
    """A wait on another rank ended without an answer; the message names the phase and the missing rank."""
