"""The backends of the MoE op, and the choice among them.

A backend is one module `megamoe.backends.<name>` that exposes `BACKEND`, a subclass of `Backend`. It is imported when
it is first considered; a module that is not part of this build counts as unavailable.
"""

from __future__ import annotations

import warnings
from importlib import import_module
from importlib.util import find_spec

import torch

from megamoe.backends.base import Backend, BackendSetup, Gradients
from megamoe.config import MoESpec
from megamoe.errors import BackendUnavailable

__all__ = ["BACKENDS", "Backend", "BackendSetup", "Gradients", "choose_backend", "unavailable"]

# fastest first: "auto" takes the first that can run
BACKENDS = ("sm90", "cpu", "reference")

_warned: set[str] = set()


def _load(name: str) -> type[Backend] | None:
    if find_spec(f"megamoe.backends.{name}") is None:
        return None
    backend: type[Backend] = import_module(f"megamoe.backends.{name}").BACKEND
    return backend


def unavailable(name: str, spec: MoESpec, device: torch.device, world_size: int) -> str | None:
    """Return why a backend cannot run a problem here (half a sentence), or None when it can.

    Args:
        name: one of `BACKENDS`.
        spec: the op's numbers.
        device: where the tensors live.
        world_size: ranks of the expert-parallel group.

    Raises:
        ValueError: there is no backend of this name.
    """
    if name not in BACKENDS:
        raise ValueError(f"backend: '{name}' is not a backend; choose auto, {', '.join(BACKENDS)}")
    backend = _load(name)
    if backend is None:
        return "it is not part of this build"
    return backend.unavailable(spec, device, world_size)


def choose_backend(name: str, spec: MoESpec, device: torch.device, world_size: int) -> type[Backend]:
    """Return the backend class for a problem.

    Args:
        name: "auto" for the first that can run, or one of `BACKENDS`.
        spec: the op's numbers.
        device: where the tensors live.
        world_size: ranks of the expert-parallel group.

    Raises:
        BackendUnavailable: the named backend cannot run here; the message says why.
        ValueError: there is no backend of this name.
    """
    if name != "auto":
        reason = unavailable(name, spec, device, world_size)
        if reason is not None:
            raise BackendUnavailable(f"kernel.backend: {name} cannot run here: {reason}")
        return _require(name)
    reasons: dict[str, str] = {}
    for candidate in BACKENDS:
        reason = unavailable(candidate, spec, device, world_size)
        if reason is None:
            if candidate == "reference" and device.type != "cpu":
                _warn_once(
                    f"kernel.backend: auto fell to the reference backend on {device}, which is slow: "
                    f"{_list_reasons(reasons)}"
                )
            return _require(candidate)
        reasons[candidate] = reason
    raise BackendUnavailable(f"kernel.backend: no backend can run on {device}: {_list_reasons(reasons)}")


def _require(name: str) -> type[Backend]:
    backend = _load(name)
    assert backend is not None, "only available backends are chosen"
    return backend


def _list_reasons(reasons: dict[str, str]) -> str:
    return "; ".join(f"{name}: {reason}" for name, reason in reasons.items())


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, RuntimeWarning, stacklevel=3)
