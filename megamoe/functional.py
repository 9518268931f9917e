"""The MoE op: the one place where kernels and communication meet.

`mega_moe` is one operator of torch's dispatcher, `megamoe::mega_moe`, with a fake implementation and an autograd
formula that recomputes in `megamoe::mega_moe_backward`; torch.compile and graph capture see these two nodes. Both
operators take an integer handle, which stands for a `MoEContext`, and a one-element tensor of that context as a mutated
argument. That tensor is the order of calls: no compiler may drop, merge or reorder calls that write it, so every rank
communicates in the same order. It is tiny because a compiler may copy a mutated argument.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megamoe.backends.context import MoEContext, context_of, shared_context
from megamoe.errors import MegaMoeError
from megamoe.kernels.eager import dispatch_modes, tracing, transforms
from megamoe.kernels.weights import ExpertWeights

__all__ = ["MoEContext", "gather_tokens", "mega_moe", "shared_context", "split_tokens", "token_range"]


_ID_DTYPES = (torch.int64, torch.int32)
_X_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


# ---- the public functions -------------------------------------------------------------------------------------------


def mega_moe(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    weights: ExpertWeights,
    context: MoEContext,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Run every token through its experts, wherever they are, and sum the weighted results. Collective over the group.

    Args:
        x: `[num_tokens, hidden]`; num_tokens may differ between ranks and be 0.
        topk_ids: `[num_tokens, top_k]` int32 or int64, global expert ids; -1 means no expert; duplicates add up.
        topk_weights: `[num_tokens, top_k]` FP32; the weight of an id -1 is never read.
        weights: this rank's experts.
        context: where and how to run.
        out: `[num_tokens, hidden]` in x.dtype to write to; not while a gradient is asked for.

    Returns:
        `[num_tokens, hidden]` in x.dtype; `out` where given.

    Raises:
        ValueError: shapes, dtypes or a format that do not fit the context.
        MegaMoeError: a gradient was asked for and there is none; an id or a token count out of bounds; a lost rank.
        MegaMoETimeout: a rank did not answer.
    """
    plain = not torch.compiler.is_compiling() and not dispatch_modes()
    if plain:
        known = context.backend.again(x, topk_ids, topk_weights, weights, out)
        if known is not None:
            return known
    spec = context.spec
    shape, ids_shape = x.shape, topk_ids.shape
    if x.dtype not in _X_DTYPES:
        raise TypeError(f"x: expected bfloat16, float16 or float32, got {x.dtype}")
    if len(shape) != 2 or shape[1] != spec.hidden:
        raise ValueError(f"x: expected [num_tokens, {spec.hidden}], got {list(shape)}")
    if ids_shape != (shape[0], spec.top_k) or topk_weights.shape != ids_shape:
        raise ValueError(
            f"topk_ids and topk_weights: expected [{shape[0]}, {spec.top_k}], got {list(ids_shape)} and "
            f"{list(topk_weights.shape)}"
        )
    if topk_weights.dtype != torch.float32:
        raise ValueError(f"topk_weights: expected float32, got {topk_weights.dtype}")
    if topk_ids.dtype not in _ID_DTYPES:
        raise ValueError(f"topk_ids: expected int32 or int64, got {topk_ids.dtype}")
    if weights.format != spec.weight_format or weights.w13.shape[0] != context.num_local_experts:
        raise ValueError(
            f"weights: expected {context.num_local_experts} experts in the format {spec.weight_format}, got "
            f"{weights.w13.shape[0]} in the format {weights.format}"
        )
    if plain and _needs_no_gradient(x, topk_weights, weights):
        # straight to the backend: a round through the dispatcher costs as much as all the rest, and an operator may not
        # return one of its arguments, so it would have to copy
        if out is not None:
            _check_out(out, x)
        return _run(context_of(context.handle), x, topk_ids, topk_weights, weights, out)
    result: Tensor = _mega_moe_op(
        x,
        topk_ids,
        topk_weights,
        weights.w13,
        weights.w13_scale,
        weights.b13,
        weights.w2,
        weights.w2_scale,
        weights.b2,
        context.order,
        context.handle,
    )
    if out is None:
        return result
    if result.requires_grad:
        raise ValueError("out: not while a gradient is asked for; call mega_moe under torch.no_grad()")
    _check_out(out, x)
    return out.copy_(result)


def _check_out(out: Tensor, x: Tensor) -> None:
    if out.shape != x.shape or out.dtype != x.dtype:
        raise ValueError(f"out: expected {list(x.shape)} {x.dtype}, got {list(out.shape)} {out.dtype}")


def _needs_no_gradient(x: Tensor, topk_weights: Tensor, weights: ExpertWeights) -> bool:
    """Return whether a call needs neither a gradient nor any other follower of the dispatcher; not while compiling."""
    if type(x) is not Tensor or transforms() is not None or tracing() is not None:
        return False
    return not torch.is_grad_enabled() or not (
        x.requires_grad
        or topk_weights.requires_grad
        or weights.w13.requires_grad
        or weights.w2.requires_grad
        or (weights.b13 is not None and weights.b13.requires_grad)
        or (weights.b2 is not None and weights.b2.requires_grad)
    )


def token_range(num_tokens: int, rank: int, world_size: int) -> tuple[int, int]:
    """Return (first, last), the half-open range of the tokens that are a rank's share; shares differ by at most one."""
    return num_tokens * rank // world_size, num_tokens * (rank + 1) // world_size


def split_tokens(x: Tensor, context: MoEContext) -> Tensor:
    """Return this rank's share of tokens that all ranks of the group hold; its gradient is gathered from all of them.

    Args:
        x: `[num_tokens, ...]`, equal on every rank.
        context: names the group.

    Returns:
        `[rows of this rank, ...]`; ranges as in `token_range`.
    """
    if context.world_size == 1:
        return x
    result: Tensor = torch.ops.megamoe.split_tokens.default(
        x, context.rank, context.world_size, context.order, context.handle
    )
    return result


def gather_tokens(rows: Tensor, num_tokens: int, context: MoEContext) -> Tensor:
    """Undo `split_tokens`: return all tokens on every rank. The gradient, equal on every rank, is split. Collective.

    Args:
        rows: `[rows of this rank, ...]`.
        num_tokens: tokens of all ranks.
        context: names the group.

    Returns:
        `[num_tokens, ...]`.
    """
    if context.world_size == 1:
        return rows
    result: Tensor = torch.ops.megamoe.gather_tokens.default(
        rows, num_tokens, context.rank, context.world_size, context.order, context.handle
    )
    return result


# ---- the operators --------------------------------------------------------------------------------------------------

_library = torch.library.Library("megamoe", "DEF")
_WEIGHTS = "Tensor w13, Tensor? w13_scale, Tensor? b13, Tensor w2, Tensor? w2_scale, Tensor? b2"
_CONTEXT = "Tensor(a!) workspace, SymInt handle"
_library.define(f"mega_moe(Tensor x, Tensor topk_ids, Tensor topk_weights, {_WEIGHTS}, {_CONTEXT}) -> Tensor")
_library.define(
    "mega_moe_backward(Tensor grad, Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor w13, Tensor? b13, "
    f"Tensor w2, Tensor? b2, {_CONTEXT}, bool[] needed) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_library.define(f"split_tokens(Tensor x, SymInt rank, SymInt world_size, {_CONTEXT}) -> Tensor")
_library.define(f"gather_tokens(Tensor rows, SymInt num_tokens, SymInt rank, SymInt world_size, {_CONTEXT}) -> Tensor")

_Six = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def _mega_moe(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w13: Tensor,
    w13_scale: Tensor | None,
    b13: Tensor | None,
    w2: Tensor,
    w2_scale: Tensor | None,
    b2: Tensor | None,
    workspace: Tensor,
    handle: int,
) -> Tensor:
    context = context_of(handle)
    experts = ExpertWeights(w13, w2, w13_scale, w2_scale, b13, b2, context.spec.weight_format)
    return _run(context, x, topk_ids, topk_weights, experts, None)


def _run(
    context: MoEContext,
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    experts: ExpertWeights,
    out: Tensor | None,
) -> Tensor:
    if context.check and not experts.packed:
        experts.validate(context.spec, context.num_local_experts)
    if out is None:
        return context.backend.forward(x, topk_ids, topk_weights, experts)
    return context.backend.forward_into(x, topk_ids, topk_weights, experts, out)


def _mega_moe_fake(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _mega_moe_backward(
    grad: Tensor,
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w13: Tensor,
    b13: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    workspace: Tensor,
    handle: int,
    needed: Sequence[bool],
) -> _Six:
    context = context_of(handle)
    context.require_gradient()
    experts = ExpertWeights(w13, w2, None, None, b13, b2, context.spec.weight_format)
    result = context.backend.backward(grad, x, topk_ids, topk_weights, experts, needed)
    no_b13, no_b2 = (grad.new_empty(0) if g is None else g for g in (result.b13, result.b2))
    return result.x, result.topk_weights, result.w13, no_b13, result.w2, no_b2


def _mega_moe_backward_fake(
    grad: Tensor,
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w13: Tensor,
    b13: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    workspace: Tensor,
    handle: int,
    needed: Sequence[bool],
) -> _Six:
    def like(t: Tensor | None) -> Tensor:
        return grad.new_empty(0) if t is None else torch.empty_like(t, memory_format=torch.contiguous_format)

    return like(x), like(topk_weights), like(w13), like(b13), like(w2), like(b2)


def _first_derivative_only(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse `create_graph=True`: `once_differentiable` alone misses losses that are linear in the result."""
    inner = once_differentiable(backward)

    def refuse_or_run(ctx: Any, *grads: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise MegaMoeError(
                "mega_moe: a second derivative was asked for, and there is none; call autograd without create_graph"
            )
        return inner(ctx, *grads)

    return refuse_or_run


class _MegaMoE(torch.autograd.Function):
    """The op with its gradient. Only inputs are kept between forward and backward."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        x, topk_ids, topk_weights, w13, _, b13, w2, _, b2, workspace, handle = args
        ctx.save_for_backward(x, topk_ids, topk_weights, w13, b13, w2, b2)
        ctx.workspace, ctx.handle = workspace, handle
        # the graph keeps the context alive until backward, as it keeps the tensors
        ctx.context = context_of(handle) if isinstance(handle, int) else None
        with torch._C._AutoDispatchBelowAutograd():
            result: Tensor = torch.ops.megamoe.mega_moe.default(*args)
        return result

    @staticmethod
    @_first_derivative_only
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, topk_ids, topk_weights, w13, b13, w2, b2 = ctx.saved_tensors
        of_x, _, of_weights, of_w13, _, of_b13, of_w2, _, of_b2, _, _ = ctx.needs_input_grad
        needed = [of_x, of_weights, of_w13, of_b13, of_w2, of_b2]
        gradients = torch.ops.megamoe.mega_moe_backward.default(
            grad, x, topk_ids, topk_weights, w13, b13, w2, b2, ctx.workspace, ctx.handle, needed
        )
        gx, gw, gw13, gb13, gw2, gb2 = (g if wanted else None for g, wanted in zip(gradients, needed, strict=True))
        return gx, None, gw, gw13, None, gb13, gw2, None, gb2, None, None


def _mega_moe_autograd(
    keys: Any,
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w13: Tensor,
    w13_scale: Tensor | None,
    b13: Tensor | None,
    w2: Tensor,
    w2_scale: Tensor | None,
    b2: Tensor | None,
    workspace: Tensor,
    handle: int,
) -> Tensor:
    args = (x, topk_ids, topk_weights, w13, w13_scale, b13, w2, w2_scale, b2, workspace, handle)
    if torch.is_grad_enabled() and (
        x.requires_grad
        or topk_weights.requires_grad
        or w13.requires_grad
        or w2.requires_grad
        or (b13 is not None and b13.requires_grad)
        or (b2 is not None and b2.requires_grad)
    ):
        if isinstance(handle, int):
            # a symbolic handle is being traced; the call that was traced has been here with its number
            context_of(handle).require_gradient()
        result: Tensor = _MegaMoE.apply(*args)
        return result
    if keys.raw_repr() in _PLAIN_KEYS:
        # nothing but a kernel is left to dispatch to: a second round through the dispatcher would cost 4 us
        return _mega_moe(*args)
    with torch._C._AutoDispatchBelowAutograd():
        result = torch.ops.megamoe.mega_moe.default(*args)
    return result


def _plain_keys() -> frozenset[int]:
    key, keys = torch._C.DispatchKey, torch._C.DispatchKeySet
    pairs = ((key.CPU, key.AutogradCPU), (key.CUDA, key.AutogradCUDA))
    return frozenset((keys(kernel) | keys(autograd)).raw_repr() for kernel, autograd in pairs)


_PLAIN_KEYS = _plain_keys()


def _split_tokens(x: Tensor, rank: int, world_size: int, workspace: Tensor, handle: int) -> Tensor:
    first, last = token_range(x.shape[0], rank, world_size)
    # a copy: an operator must not return a view of its input
    return x[first:last].clone()


def _split_tokens_fake(x: Tensor, rank: int, world_size: int, workspace: Tensor, handle: int) -> Tensor:
    first, last = token_range(x.shape[0], rank, world_size)
    return x.new_empty((last - first, *x.shape[1:]))


def _gather_tokens(rows: Tensor, num_tokens: int, rank: int, world_size: int, workspace: Tensor, handle: int) -> Tensor:
    ranges = [token_range(num_tokens, peer, world_size) for peer in range(world_size)]
    counts = [last - first for first, last in ranges]
    return context_of(handle).collectives.all_gather(rows, counts, phase="gathering of tokens")


def _gather_tokens_fake(
    rows: Tensor, num_tokens: int, rank: int, world_size: int, workspace: Tensor, handle: int
) -> Tensor:
    return rows.new_empty((num_tokens, *rows.shape[1:]))


class _SplitTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *rest: Any) -> Tensor:
        ctx.num_tokens, ctx.rest = x.shape[0], rest
        with torch._C._AutoDispatchBelowAutograd():
            result: Tensor = torch.ops.megamoe.split_tokens.default(x, *rest)
        return result

    @staticmethod
    @_first_derivative_only
    def backward(ctx: Any, grad: Tensor) -> Any:
        whole = torch.ops.megamoe.gather_tokens.default(grad, ctx.num_tokens, *ctx.rest)
        return whole, None, None, None, None


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, num_tokens: int, *rest: Any) -> Tensor:
        ctx.rest = rest
        with torch._C._AutoDispatchBelowAutograd():
            result: Tensor = torch.ops.megamoe.gather_tokens.default(rows, num_tokens, *rest)
        return result

    @staticmethod
    @_first_derivative_only
    def backward(ctx: Any, grad: Tensor) -> Any:
        return torch.ops.megamoe.split_tokens.default(grad, *ctx.rest), None, None, None, None, None


def _split_tokens_autograd(*args: Any) -> Tensor:
    result: Tensor = _SplitTokens.apply(*args)
    return result


def _gather_tokens_autograd(*args: Any) -> Tensor:
    result: Tensor = _GatherTokens.apply(*args)
    return result


def _register() -> None:
    for name, kernel, fake in (
        ("mega_moe", _mega_moe, _mega_moe_fake),
        ("mega_moe_backward", _mega_moe_backward, _mega_moe_backward_fake),
        ("split_tokens", _split_tokens, _split_tokens_fake),
        ("gather_tokens", _gather_tokens, _gather_tokens_fake),
    ):
        _library.impl(name, kernel, "CompositeExplicitAutograd")
        torch.library.register_fake(f"megamoe::{name}", fake, lib=_library)
    _library.impl("mega_moe", _mega_moe_autograd, "Autograd", with_keyset=True)
    _library.impl("split_tokens", _split_tokens_autograd, "Autograd")
    _library.impl("gather_tokens", _gather_tokens_autograd, "Autograd")


_register()
# looked up once: the three attribute reads cost as much as a check
_mega_moe_op = torch.ops.megamoe.mega_moe.default
