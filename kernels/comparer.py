"""Whether tensors look like others that have been checked before, asked in the cheapest way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

__all__ = ["comparer", "guard", "seen"]


def seen(tensors: tuple[Tensor, ...]) -> tuple[object, ...]:
    """Return what the checks look at except pointers."""
    return tuple((t.dtype, t.shape, t.stride(), t.get_device()) for t in tensors)


def guard(tensors: tuple[Tensor, ...]) -> Callable[..., bool] | None:
    """Return torch's own guard: whether other tensors have the same types, dtypes, shapes, strides, devices, needs of a
    gradient and followers of the dispatcher.

    It asks this of all tensors in one call, in a quarter of the time. It is not part of torch's public interface; None
    for a torch without it, or where it means something else.
    """
    try:
        from torch._C._dynamo.guards import TensorGuards

        sizes: Any = [list(t.shape) for t in tensors]
        strides: Any = [list(t.stride()) for t in tensors]
        check: Callable[..., bool] = TensorGuards(
            *tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides
        ).check
        if check(*tensors) and not check(tensors[0].unsqueeze(0), *tensors[1:]):
            return check
    except (ImportError, AttributeError, TypeError, ValueError, RuntimeError):
        pass
    return None


def comparer(tensors: tuple[Tensor, ...]) -> Callable[..., bool]:
    """Return a function that says whether other tensors have the same dtypes, shapes, strides and devices."""
    check = guard(tensors)
    if check is not None:
        return check
    known = seen(tensors)
    return lambda *others: seen(others) == known
