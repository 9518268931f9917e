"""The MoE layer: router, routed experts spread over the ranks of a group, optional shared experts.

Shape letters: T tokens of this rank, H hidden, K experts per token.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from megamoe.comm.collectives import Collectives
from megamoe.comm.groups import EXPERT_AXIS, GroupLike, expert_group, resolve_group
from megamoe.config import MoEConfig
from megamoe.errors import ConfigError, MegaMoeError
from megamoe.functional import MoEContext, gather_tokens, mega_moe, shared_context, split_tokens
from megamoe.kernels.eager import is_eager
from megamoe.layers.experts import Experts, is_expert_parallel
from megamoe.layers.router import Router
from megamoe.layers.shared_experts import SharedExperts

__all__ = ["MoELayer", "Routing", "sync_replicated_grads"]

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class Routing(NamedTuple):
    """Where the tokens of the last call went: `ids` `[T, K]` int64 and `weights` `[T, K]` FP32, detached."""

    ids: Tensor
    weights: Tensor


class MoELayer(nn.Module):
    """Router + expert-parallel experts + shared experts, as one module.

    Construction is collective over the group. Parameters start from values that every rank agrees on: one seed is
    drawn from torch's default generator of rank 0, and each expert has its own stream of it, so that a layer starts
    with the same weights on any number of ranks.

    Args:
        config: the whole configuration; see `MoEConfig`.
        group: the ranks that share the experts: a `ProcessGroup` or a `DeviceMesh` (of any subset of the world); None
            makes this rank work alone with `expert_parallel_size: 1`, and else splits the world into blocks of
            consecutive ranks of that size.
        workspace: symmetric memory to share between layers, for backends that use one; None = the backend's own.
        device: where parameters live; None = torch's default device.

    Attributes:
        router, experts, shared_experts: the parts; `shared_experts` is None without.
        context: the op's context (backend, group), shared with other layers of the same sizes; None on meta.
        record_routing: set to True to keep `last_routing`.
        last_routing: `Routing` of the last call, of the tokens that this rank routed.
        aux_loss: the router's load-balancing loss of the last call, or None.
        auto_pack: set to False to keep quantised experts canonical; see `pack_`.

    Raises:
        ConfigError: sizes that the group cannot share, or ranks that disagree.
        BackendUnavailable: the named backend cannot run here.
    """

    def __init__(
        self,
        config: MoEConfig,
        group: GroupLike = None,
        workspace: Any = None,
        *,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.spec = spec = config.spec
        self._workspace = workspace
        device = torch.get_default_device() if device is None else torch.device(device)
        self._group = self._resolve(group)
        self.context: MoEContext | None = self._make_context(device)
        if self.context is not None:
            # layers that share a context share its spec object too: compiled graphs compare identities
            self.spec = spec = self.context.spec

        model = config.model
        dtype = _DTYPES[model.dtype]
        ranks = resolve_group(self._group)
        num_local = spec.num_experts // ranks.world_size
        self.router = Router(
            config.router, spec.hidden, spec.num_experts, spec.top_k, vocab_size=model.vocab_size, device=device
        )
        self.experts = Experts(spec, num_local, dtype, device, first_expert=ranks.rank * num_local)
        self.shared_experts: SharedExperts | None = None
        if model.shared_experts:
            self.shared_experts = SharedExperts(
                spec.hidden,
                model.shared_width,
                activation=spec.activation,
                limit=spec.swiglu_limit,
                alpha=spec.swiglu_alpha,
                gated=model.shared_gate,
                dtype=dtype,
                device=device,
            )
        self.replicated_input = config.parallel.replicated_input
        self.record_routing = False
        self.auto_pack = True
        self.last_routing: Routing | None = None
        self.aux_loss: Tensor | None = None
        self.reset_parameters()

    # ---- construction -----------------------------------------------------------------------------------------------

    def _resolve(self, group: GroupLike) -> GroupLike:
        size = self.config.parallel.expert_parallel_size
        if group is None:
            return expert_group(size)
        actual = resolve_group(group).world_size
        if actual != size:
            raise ConfigError(
                f"parallel.expert_parallel_size is {size} and the group has {actual} ranks; make them equal"
            )
        return group

    def _make_context(self, device: torch.device) -> MoEContext | None:
        if device.type == "meta":
            # nothing can run there; `to_empty` makes the context
            return None
        parallel, kernel = self.config.parallel, self.config.kernel
        return shared_context(
            self.spec,
            self._group,
            kernel.backend,
            device=device,
            max_tokens_per_rank=parallel.max_tokens_per_rank,
            overflow=parallel.overflow,
            timeout_s=parallel.timeout_s,
            check=kernel.check,
            comm=parallel.comm,
            workspace=self._workspace,
        )

    @torch.no_grad()
    def reset_parameters(self, seed: int | None = None) -> None:
        """Draw all parameters anew. Collective over the group.

        Args:
            seed: the same on every rank; None draws it from the default generator of the group's rank 0.
        """
        if seed is None:
            seed = int(torch.randint(2**31, (), device="cpu"))
            if self.context is not None:
                seed = self.context.collectives.gather_objects(seed, phase="initial values")[0]
        device = self.router.weight.device
        devices = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(seed)
            self.router.reset_parameters()
            if self.shared_experts is not None:
                self.shared_experts.reset_parameters()
        self.experts.reset_parameters(seed)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        result = super()._apply(fn, recurse)
        device = self.experts.w13.device
        if self.context is None or device != self.context.device:
            self.context = self._make_context(device)
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> MoELayer:
        # a copy works on the same ranks and workspace; what the last call left behind belongs to the original
        memo[id(self._group)] = self._group
        memo[id(self._workspace)] = self._workspace
        twin = self.__class__.__new__(self.__class__)
        memo[id(self)] = twin
        state = {name: value for name, value in self.__dict__.items() if name not in ("aux_loss", "last_routing")}
        twin.__setstate__({**copy.deepcopy(state, memo), "aux_loss": None, "last_routing": None})
        return twin

    # ---- the layer --------------------------------------------------------------------------------------------------

    def forward(self, hidden_states: Tensor, input_ids: Tensor | None = None) -> Tensor:
        """Run the layer. Collective over the group; ranks may bring different numbers of tokens, or none.

        Args:
            hidden_states: `[..., hidden]`, floating.
            input_ids: `[...]`, the token ids, for hash routing.

        Returns:
            `[..., hidden]` in the dtype of hidden_states.
        """
        context = self.context
        if context is None:
            raise ConfigError("this layer is on the meta device; call to_empty(device=...) and load its weights first")
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        num_tokens = x.shape[0]
        ids = None if input_ids is None else input_ids.reshape(-1)
        if self.replicated_input:
            x = split_tokens(x, context)
            ids = None if ids is None else split_tokens(ids, context)
        shared = self._start_shared(x)
        routing = self.router(x, ids)
        self.aux_loss = routing.aux_loss
        if self.record_routing:
            self.last_routing = Routing(routing.topk_ids.detach(), routing.topk_weights.detach())
        if not torch.compiler.is_compiling():
            # a graph holds one form of the weights: what it was compiled with
            self._arrange_experts(context, x, routing.topk_weights)
        y = mega_moe(x, routing.topk_ids, routing.topk_weights, self.experts.operands(), context)
        if shared is not None:
            y = y + shared()
        if self.replicated_input:
            y = gather_tokens(y, num_tokens, context)
        return y.reshape(hidden_states.shape)

    def _start_shared(self, x: Tensor) -> Callable[[], Tensor] | None:
        """Start the shared experts where they can run beside the rest; return what gives their result, None without.

        In a graph that is captured without a gradient they are on a stream of their own: beside the router, and what
        has not begun when the mega-kernel takes all SMs runs behind it. In eager calls the host is the slower part, and
        two streams cost it more than they save.
        """
        experts = self.shared_experts
        if experts is None:
            return None
        captured = x.is_cuda and not torch.compiler.is_compiling() and torch.cuda.is_current_stream_capturing()
        if not captured or torch.is_grad_enabled() or not is_eager(x, *experts.parameters()):
            return functools.partial(experts, x)
        current, side = torch.cuda.current_stream(x.device), _side_stream(x.device)
        side.wait_stream(current)
        with torch.cuda.stream(side):
            result: Tensor = experts(x)

        def wait() -> Tensor:
            current.wait_stream(side)
            result.record_stream(current)
            return result

        return wait

    def pack_(self) -> MoELayer:
        """Let the backend's packed form take the place of the canonical expert matrices, for inference.

        Quantised experts are packed by the first call without this, unless `auto_pack` is False: nothing can train
        them, so nobody else wants the canonical bytes. Experts that are not quantised are packed on request alone,
        because optimizers and averages of weights hold them, and look at them between calls. `train()`, and a call
        that a gradient is asked of, bring their canonical form back.

        Does nothing where the backend has no layout of its own.

        Raises:
            MegaMoeError: the experts can be trained, and the layer is in training mode.
        """
        layout = None if self.context is None else self.context.backend.layout
        if layout is None:
            return self
        if self.training and self.spec.weight_format == "none":
            raise MegaMoeError(
                "pack_: training needs the canonical weights, and the layer is in training mode; call eval()"
            )
        self.experts.pack_(layout)
        return self

    def unpack_(self) -> MoELayer:
        """Bring the canonical expert matrices back, byte for byte."""
        self.experts.unpack_()
        return self

    def _arrange_experts(self, context: MoEContext, x: Tensor, weights: Tensor) -> None:
        """Pack or unpack the experts where the coming call wants it."""
        experts, layout = self.experts, context.backend.layout
        quantised = self.spec.weight_format != "none"
        if experts.layout is None:
            # tensors that torch.func or FSDP put in place of the parameters for a call are not this layer's to change
            if quantised and self.auto_pack and layout is not None and is_expert_parallel(experts.w13):
                experts.pack_(layout)
            return
        gradient = torch.is_grad_enabled() and (
            x.requires_grad or weights.requires_grad or any(p.requires_grad for p in experts.parameters())
        )
        # another backend's layout is met where a layer was given another context
        if layout is None or layout.layout_id != experts.layout.layout_id or (gradient and not quantised):
            experts.unpack_()

    def load_expert(self, expert_id: int, **tensors: Tensor) -> None:
        """Overwrite one expert of this rank in place; see `Experts.load_expert`."""
        self.experts.load_expert(expert_id, **tensors)

    def sync_replicated_grads(self, *, reduction: str = "sum") -> None:
        """Add up the gradients of the parameters that every rank of the group holds; see the function of this name."""
        sync_replicated_grads(self, self._group, reduction=reduction, timeout_s=self.config.parallel.timeout_s)

    # ---- checkpoints ------------------------------------------------------------------------------------------------

    def distributed_state_dict(self) -> dict[str, Any]:
        """Return a state dict for torch.distributed.checkpoint: expert tensors as `DTensor` sharded over experts.

        A checkpoint saved from it loads at any number of ranks that divides the experts. To load one, fill this dict
        by `torch.distributed.checkpoint.load` and hand it to `load_distributed_state_dict`.
        """
        state: dict[str, Any] = dict(self.state_dict())
        if isinstance(self._group, DeviceMesh):
            mesh = self._group if self._group.ndim == 1 else self._group[EXPERT_AXIS]
        elif self._group is not None:
            mesh = DeviceMesh.from_group(self._group, self.experts.w13.device.type)
        else:
            return state
        for name in state:
            if name.startswith("experts."):
                state[name] = DTensor.from_local(state[name], mesh, [Shard(0)], run_check=False)
        return state

    @torch.no_grad()
    def load_distributed_state_dict(self, state: dict[str, Any]) -> None:
        """Copy a state dict of `distributed_state_dict`'s form into the layer, in place."""
        local = {name: value.to_local() if isinstance(value, DTensor) else value for name, value in state.items()}
        self.load_state_dict(local)

    def extra_repr(self) -> str:
        spec = self.spec
        limit = "" if spec.swiglu_limit is None else f"({spec.swiglu_limit:g})"
        context = self.context
        ranks = "meta" if context is None else f"{context.backend_name}, rank {context.rank} of {context.world_size}"
        return (
            f"hidden={spec.hidden}, intermediate={spec.intermediate}, "
            f"experts={spec.num_experts} ({self.experts.num_local_experts} here), top_k={spec.top_k}, "
            f"activation={spec.activation}{limit}, weights={spec.weight_format}, act_scale={spec.act_scale}, "
            f"backend={ranks}"
        )


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@torch.no_grad()
def sync_replicated_grads(
    module: nn.Module, group: GroupLike = None, *, reduction: str = "sum", timeout_s: float = 600.0
) -> None:
    """Make the gradients of replicated parameters (router, shared experts, dense layers) equal over a group.

    After backward an expert's gradient is that of the sum of all ranks' losses: every rank's tokens have contributed.
    A replicated parameter has seen only this rank's tokens. "sum" adds those up, so that all gradients are of the sum
    of the ranks' losses. "mean" gives gradients of the mean of the ranks' losses: it adds up too, and divides all
    gradients, the experts' included, by the number of ranks.

    A parameter that got no gradient on this rank counts as zero, so ranks without tokens stay in step; one that got
    none on any rank keeps None. Sums are FP32, in rank order: every rank gets the same bits. Collective.

    Args:
        module: any module with `MoELayer`s in it, the same on every rank.
        group: the expert-parallel group; None = that of the `MoELayer`s in the module.
        reduction: "sum" or "mean".
        timeout_s: bound of every wait, seconds.

    Raises:
        ValueError: another reduction, or layers of several groups and no group given.
    """
    if reduction not in ("sum", "mean"):
        raise ValueError(f"reduction: expected sum or mean, got {reduction!r}")
    if group is None:
        found = [layer._group for layer in module.modules() if isinstance(layer, MoELayer)]
        if len({resolve_group(g).process_group for g in found}) > 1:
            raise ValueError("group: the module's MoELayers are on several groups; name the one to reduce over")
        group = found[0] if found else None
    ranks = resolve_group(group)
    if ranks.world_size == 1:
        return
    params = [p for p in module.parameters() if p.requires_grad]
    replicated = [p for p in params if not is_expert_parallel(p)]
    if replicated:
        device = replicated[0].device
        # one message: which gradients exist, then their values
        present = torch.tensor([float(p.grad is not None) for p in replicated], device=device)
        flat = [
            p.new_zeros(p.numel(), dtype=torch.float32) if p.grad is None else p.grad.float().reshape(-1)
            for p in replicated
        ]
        collectives = Collectives(ranks, device, timeout_s)
        total = collectives.all_reduce(torch.cat([present, *flat]), phase="sum of replicated gradients")
        exists, *sums = total.split([len(replicated), *(p.numel() for p in replicated)])
        for param, count, values in zip(replicated, exists.tolist(), sums, strict=True):
            if count == 0:
                continue
            if param.grad is None:
                param.grad = torch.empty_like(param)
            param.grad.copy_(values.view_as(param))
    if reduction == "mean":
        for param in params:
            if param.grad is not None:
                param.grad.div_(ranks.world_size)
