"""The router of a MoE layer: which experts a token goes to, and with which weights.

Shape letters: T tokens, H hidden, E experts, K experts per token, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megamoe.config import RouterConfig
from megamoe.errors import ConfigError
from megamoe.kernels import routing
from megamoe.kernels.eager import is_eager
from megamoe.kernels.route import RouteShape, can_route, route
from megamoe.kernels.router_logits import router_logits, takes_logits

__all__ = ["Router", "RouterOutput"]


class RouterOutput(NamedTuple):
    """What a router says about a batch of tokens.

    Attributes:
        topk_ids: `[num_tokens, top_k]` int64, the best key first; -1 (hash routing only) means no expert.
        topk_weights: `[num_tokens, top_k]` FP32.
        logits: `[num_tokens, num_experts]` FP32, the logit bias included.
        aux_loss: the scalar load-balancing loss times its coefficient, or None without one.
    """

    topk_ids: Tensor
    topk_weights: Tensor
    logits: Tensor
    aux_loss: Tensor | None


class Router(nn.Module):
    """Map tokens to experts by one row of `RouterConfig`'s menu; the formulas are in `megamoe.kernels.routing`.

    Logits are computed in FP32 whatever the dtype of the tokens and of `weight`, also under autocast. The gradient
    reaches `weight` (and `bias`) through the routing weights and the auxiliary loss; the choice itself has none.
    A token with NaN logits gets distinct ids in range, and NaN weights. Without a gradient, kernels do all of it
    on Hopper (`kernels.router_logits`, `kernels.route`).

    Parameters and buffers:
        weight: `[num_experts, hidden]`.
        bias: `[num_experts]` with `logit_bias`, added to the logits.
        e_score_correction_bias: `[num_experts]` FP32 buffer with `bias`; it shifts the choice and not the weights, has
            no gradient, and stays FP32 when the module is cast. Hash routing chooses nothing, so it has none.
        tid2eid: `[vocab_size, top_k]` int64 buffer with `select="hash"`: the experts of each token id.
        load: `[num_experts]` int64, not saved: how often each expert was chosen since `reset_load`. A forward that is
            recomputed (activation checkpointing) counts again.

    Args:
        config: the router section of the configuration.
        hidden: width of a token.
        num_experts: experts of the whole layer, over all ranks.
        top_k: experts per token.
        vocab_size: rows of `tid2eid`; needed with `select="hash"` only.
        dtype: of `weight` and `bias`.
        device: where they live.

    Raises:
        ConfigError: the numbers do not fit each other.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    e_score_correction_bias: Tensor | None
    tid2eid: Tensor | None
    load: Tensor

    def __init__(
        self,
        config: RouterConfig,
        hidden: int,
        num_experts: int,
        top_k: int,
        *,
        vocab_size: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        _check(config, num_experts, top_k, vocab_size)
        self.config = config
        self.hidden = hidden
        self.num_experts = num_experts
        self.top_k = top_k
        # ordinary tensors even under inference_mode: such a router can be called outside of it, and trained
        with torch.inference_mode(False):
            self.weight = nn.Parameter(torch.empty(num_experts, hidden, dtype=dtype, device=device))
            self.bias = (
                nn.Parameter(torch.empty(num_experts, dtype=dtype, device=device)) if config.logit_bias else None
            )
            correction, table = None, None
            if config.select == "hash" and vocab_size is not None:
                table = torch.empty(vocab_size, top_k, dtype=torch.int64, device=device)
            elif config.bias:
                correction = torch.empty(num_experts, dtype=torch.float32, device=device)
            self._shape = RouteShape.of(config, num_experts, top_k)
            self.register_buffer("e_score_correction_bias", correction)
            self.register_buffer("tid2eid", table)
            self.register_buffer("load", torch.empty(num_experts, dtype=torch.int64, device=device), persistent=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw `weight` so that unit-variance tokens give unit-variance logits, zero the biases, lay out `tid2eid`.

        The table gives token t the experts (t + j * (E // K)) mod E: distinct, equally often used, spread over ranks.
        """
        nn.init.normal_(self.weight, std=self.hidden**-0.5)
        if self.bias is not None:
            self.bias.zero_()
        if self.e_score_correction_bias is not None:
            self.e_score_correction_bias.zero_()
        if self.tid2eid is not None:
            vocab_size, top_k = self.tid2eid.shape
            token = torch.arange(vocab_size, device=self.tid2eid.device).unsqueeze(-1)
            step = torch.arange(top_k, device=self.tid2eid.device) * (self.num_experts // top_k)
            self.tid2eid.copy_((token + step) % self.num_experts)
        self.load.zero_()

    def forward(self, x: Tensor, input_ids: Tensor | None = None) -> RouterOutput:
        """Route a batch of tokens, and add it to `load`.

        Args:
            x: tokens `[num_tokens, hidden]`, any floating dtype; num_tokens may be 0.
            input_ids: token ids `[num_tokens]`, int32 or int64, below `vocab_size`; read by hash routing only, where a
                negative id means a token without experts.

        Returns:
            Ids, weights, logits and the optional auxiliary loss.

        Raises:
            ValueError: a shape does not fit, or hash routing got no input_ids.
        """
        if x.dim() != 2 or x.shape[1] != self.hidden:
            raise ValueError(f"x: must be [num_tokens, {self.hidden}], got {list(x.shape)}")
        if self.tid2eid is not None and (input_ids is None or input_ids.shape != x.shape[:1]):
            got = "None" if input_ids is None else str(list(input_ids.shape))
            raise ValueError(f"input_ids: hash routing needs the token ids [{x.shape[0]}] of x, got {got}")
        config = self.config
        if self._has_kernels(x, input_ids):
            return self._route_by_kernels(x, input_ids)
        logits_TE = routing.router_logits(x, self.weight, self.bias)
        if self.tid2eid is not None and input_ids is not None:
            ids_TK = routing.lookup_experts(self.tid2eid, input_ids)
        else:
            ids_TK = routing.choose_experts(
                logits_TE,
                score=config.score,
                top_k=self.top_k,
                correction_bias_E=self.e_score_correction_bias,
                groups=config.groups,
                topk_groups=config.topk_groups,
                group_reduce=config.group_reduce,
            )
        weights_TK = routing.routing_weights(
            logits_TE, ids_TK, score=config.score, renormalize=config.renormalize, scale=config.scale
        )
        counts_E = routing.expert_counts(ids_TK, self.num_experts)
        self.load.add_(counts_E)
        return RouterOutput(ids_TK, weights_TK, logits_TE, self._aux_loss(logits_TE, counts_E))

    def _aux_loss(self, logits_TE: Tensor, counts_E: Tensor) -> Tensor | None:
        config = self.config
        if not config.aux_loss:
            return None
        return config.aux_loss * routing.load_balancing_loss(logits_TE, counts_E, score=config.score)

    def _has_kernels(self, x: Tensor, input_ids: Tensor | None) -> bool:
        """Return whether kernels of ours route this call: on Hopper, where nothing but the result is asked for."""
        tensors = (x, self.weight, self.bias, self.e_score_correction_bias, self.tid2eid, self.load, input_ids)
        # a compiler must not follow what comes behind is_eager: it looks for an installed package
        if not is_eager(*tensors) or not x.is_cuda or not can_route(self._shape, x.device):
            return False
        if not all(t is None or (t.device == x.device and t.is_contiguous()) for t in tensors[1:]):
            return False
        # a checkpoint that is loaded with assign=True brings buffers of its own dtypes
        correction, table = self.e_score_correction_bias, self.tid2eid
        return (correction is None or correction.dtype == torch.float32) and (
            table is None or table.dtype == torch.int64
        )

    def _route_by_kernels(self, x: Tensor, input_ids: Tensor | None) -> RouterOutput:
        has_kernel = takes_logits(x, self.weight, self.bias)
        logits_TE = (router_logits if has_kernel else routing.router_logits)(x, self.weight, self.bias)
        correction_E, scale = self.e_score_correction_bias, self.config.scale
        ids_TK, weights_TK = route(
            self._shape, logits_TE, correction_E, scale, self.load, table=self.tid2eid, input_ids=input_ids
        )
        aux_loss = None
        if self.config.aux_loss:
            aux_loss = self._aux_loss(logits_TE, routing.expert_counts(ids_TK, self.num_experts))
        return RouterOutput(ids_TK, weights_TK, logits_TE, aux_loss)

    def reset_load(self) -> None:
        """Set the counters of `load` to zero."""
        self.load.zero_()

    def extra_repr(self) -> str:
        config = self.config
        parts = [f"hidden={self.hidden}", f"num_experts={self.num_experts}", f"top_k={self.top_k}", config.score]
        if self.tid2eid is not None:
            parts.append(f"hash of {self.tid2eid.shape[0]} token ids")
        if self.e_score_correction_bias is not None:
            parts.append("correction bias")
        if self.bias is not None:
            parts.append("logit bias")
        if config.groups > 1:
            parts.append(f"best {config.topk_groups} of {config.groups} groups by {config.group_reduce}")
        if config.renormalize:
            parts.append("renormalized")
        parts.append(f"scale={config.scale}")
        if config.aux_loss:
            parts.append(f"aux_loss={config.aux_loss}")
        return ", ".join(parts)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        # `.to(bfloat16)`, `.half()` and the like cast every floating buffer. The correction bias decides between close
        # scores, so it follows to the new device with its FP32 values.
        before = self.e_score_correction_bias
        result = super()._apply(fn, recurse)
        after = self.e_score_correction_bias
        if before is not None and after is not None and after.dtype != torch.float32:
            self.e_score_correction_bias = before.to(device=after.device, dtype=torch.float32)
        return result


def _check(config: RouterConfig, num_experts: int, top_k: int, vocab_size: int | None) -> None:
    """Raise ConfigError unless every token can get top_k distinct experts: `MoEConfig`'s rules, for a router alone."""
    if not 0 < top_k <= num_experts:
        raise ConfigError(f"top_k: must be in 1..num_experts={num_experts}, got {top_k}")
    if config.select == "hash":
        if vocab_size is None:
            raise ConfigError("vocab_size: select='hash' needs it, its table has one row per token id; got None")
        return
    group_size, rest = divmod(num_experts, config.groups)
    if rest:
        raise ConfigError(f"router.groups: must divide num_experts={num_experts}, got {config.groups}")
    if config.groups > 1 and config.group_reduce == "top2" and group_size < 2:
        raise ConfigError(
            f"router.group_reduce: 'top2' needs groups of 2 or more, got {config.groups} groups of {group_size}"
        )
    if config.topk_groups * group_size < top_k:
        raise ConfigError(
            f"router.topk_groups: must be at least {-(-top_k // group_size)}, because each group gives {group_size} of "
            f"top_k={top_k} experts, got {config.topk_groups}"
        )
