"""Whether a kernel may be launched in place of torch's functions."""

from __future__ import annotations

from functools import lru_cache
from importlib.util import find_spec

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

__all__ = ["dispatch_modes", "is_eager", "runs_kernels", "tracing", "transforms"]

# who follows the dispatcher: modes (fake tensors, tracers), function transforms, torch.jit.trace
dispatch_modes = torch._C._len_torch_dispatch_stack
transforms = torch._C._functorch.peek_interpreter_stack
tracing = torch._C._get_tracing_state

_PLAIN = (Tensor, nn.Parameter)
_CAPABILITY = (9, 0)


@lru_cache
def runs_kernels(device: torch.device) -> bool:
    """Return whether a device is a Hopper GPU and what compiles kernels is installed."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != _CAPABILITY:
        return False
    return find_spec("cuda") is not None and find_spec("cuda.core") is not None


def is_eager(*tensors: Tensor | None) -> bool:
    """Return whether a call is run here and now, on plain tensors, and no gradient is asked of any of them.

    Otherwise torch's own functions must be called: a compiler, a tracer, a transform, a subclass of Tensor or autograd
    would not see a launch.
    """
    if torch.compiler.is_compiling() or dispatch_modes() or transforms() is not None or tracing() is not None:
        return False
    if forward_ad._current_level >= 0:  # a tensor does not tell cheaply whether it has a tangent
        return False
    with_gradient = torch.is_grad_enabled()
    return all(t is None or (type(t) in _PLAIN and not (with_gradient and t.requires_grad)) for t in tensors)
