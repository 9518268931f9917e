"""Attention to the tokens that a lightning indexer keeps: DeepSeek-V3.2 and GLM-DSA, and a grouped-heads form.

Shape letters: B sequences, S tokens of a sequence in this call, N real tokens of all sequences, H hidden, A heads,
L width of the latent of keys and values, R turned elements, K kept keys.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megamoe.config import AttentionConfig, IndexerConfig, MoEConfig
from megamoe.errors import ConfigError, MegaMoeError
from megamoe.kernels.index_rows import IndexRows, pool_of_rows, read_rows, write_rows
from megamoe.kernels.index_scores import Segment
from megamoe.kernels.rope import apply_rope, rope_frequencies, rope_tables, yarn_logit_scale
from megamoe.kernels.sparse_attention import RowCut, sparse_attention
from megamoe.layers.attention_checkpoint import rename_and_dequantize
from megamoe.layers.indexer import Indexer
from megamoe.layers.paged_cache import PagedCache
from megamoe.layers.token_layout import TokenLayout

__all__ = ["IndexerAttention", "attention_sections", "check_hidden_states"]

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
# Queries that are scored, or projected and attended, at a time without gradients.
_PART = 1024

# DeepSeek's name -> transformers' name, which is the module's
DEEPSEEK_NAMES = {
    "wq_a": "q_a_proj",
    "q_norm": "q_a_layernorm",
    "wq_b": "q_b_proj",
    "wkv_a": "kv_a_proj_with_mqa",
    "kv_norm": "kv_a_layernorm",
    "wkv_b": "kv_b_proj",
    "wo": "o_proj",
}


def attention_sections(config: MoEConfig) -> tuple[AttentionConfig, IndexerConfig]:
    """Return both sections of a configuration that describe its attention.

    Raises:
        ConfigError: it has none.
    """
    if config.attention is None or config.indexer is None:
        raise ConfigError(f"{config.source}: attention needs the sections 'indexer' and 'attention'; add them")
    return config.attention, config.indexer


class _Keys(NamedTuple):
    """What the queries of one call may attend to.

    Attributes:
        rows: `[R, G, W]`, what keys and values are cut out of: of this call's tokens, or the cache's pool.
        index_keys: the indexer's keys of this call's tokens, `[N, D]`; None without an indexer.
        starts: `[N]` int32: the first of this call's tokens of the same sequence.
        cache: where the rows stand in their sequences' pages; None when they are this call's alone.
    """

    rows: Tensor
    index_keys: Tensor | None
    starts: Tensor
    cache: PagedCache | None


class IndexerAttention(nn.Module):
    """Causal attention in which each query attends to the `top_k` tokens that the indexer scores best.

    `kind: mla` keeps one latent row per token: the value is the latent, the key is the latent with the turned part; the
    up-projections are absorbed into queries and outputs, so keys and values of heads are never made. `kind: gqa` keeps
    grouped heads.

    Gradients go through the kept tokens. The indexer has none of its own, unless `train_indexer`.

    Parameters have the names of transformers' checkpoints; DeepSeek's names, and FP8 matrices with scales in
    `*.weight_scale_inv`, are taken by `load_state_dict` too (docs/indexer.md):
        q_a_proj.weight: `[q_lora, H]`; q_a_layernorm.weight: `[q_lora]`; q_b_proj.weight: `[A * query_dim, q_lora]`.
        mla: kv_a_proj_with_mqa.weight: `[L + R, H]`; kv_a_layernorm.weight: `[L]`;
            kv_b_proj.weight: `[A * (nope_dim + value_dim), L]`.
        gqa: k_proj.weight, v_proj.weight: `[kv_heads * head_dim, H]`.
        o_proj.weight: `[H, A * value_dim]`.
        indexer.*: see `Indexer`.

    Args:
        config: the whole configuration; the sections `indexer` and `attention` are read, `model.hidden` and
            `model.dtype`.
        shared_indexer: this layer has no indexer, and takes the choice of an earlier one (GLM's "shared" layers).
        device: where parameters live; None = torch's default device.

    Attributes:
        train_indexer: `indexer.train`: in training mode a call leaves `indexer_loss` behind.
        indexer_loss: of the last call: the mean over tokens of KL(p || softmax of the scores of the kept tokens), p the
            attention's weights, averaged over heads (DeepSeek-V3.2-Exp report, equation 4). Its gradient reaches the
            indexer alone. Or None.

    Raises:
        ConfigError: no such sections, or `attention.kind: compressed`, which is `CompressedAttention`'s.
    """

    def __init__(
        self, config: MoEConfig, *, shared_indexer: bool = False, device: torch.device | str | None = None
    ) -> None:
        super().__init__()
        self.config = attention, indexer = attention_sections(config)
        if attention.kind == "compressed":
            raise ConfigError("attention.kind=compressed is CompressedAttention's; IndexerAttention takes mla or gqa")
        self.hidden = hidden = config.model.hidden
        dtype = _DTYPES[config.model.dtype]

        def linear(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=False, dtype=dtype, device=device)

        def norm(width: int) -> nn.RMSNorm:
            return nn.RMSNorm(width, eps=attention.norm_eps, dtype=dtype, device=device)

        self.q_a_proj = linear(hidden, attention.q_lora)
        self.q_a_layernorm = norm(attention.q_lora)
        self.q_b_proj = linear(attention.q_lora, attention.heads * attention.query_dim)
        if attention.kind == "mla":
            self.latent, self.nope, self.value = (
                _required(attention, name) for name in ("kv_lora", "nope_dim", "value_dim")
            )
            self.row_heads, self.row_width = 1, self.latent + attention.rope_dim
            self.cut = RowCut((0, self.row_width), (0, self.latent))
            self.kv_a_proj_with_mqa = linear(hidden, self.row_width)
            self.kv_a_layernorm = norm(self.latent)
            self.kv_b_proj = linear(self.latent, attention.heads * (self.nope + self.value))
        else:
            self.row_heads, self.value = (_required(attention, name) for name in ("kv_heads", "head_dim"))
            self.row_width = 2 * self.value
            self.cut = RowCut((0, self.value), (self.value, 2 * self.value))
            self.k_proj = linear(hidden, self.row_heads * self.value)
            self.v_proj = linear(hidden, self.row_heads * self.value)
        self.o_proj = linear(attention.heads * self.value, hidden)
        self.indexer: Indexer | None = None
        if not shared_indexer:
            self.indexer = Indexer(indexer, hidden, attention.q_lora, attention.rope_dim, dtype=dtype, device=device)
        self.scale = attention.query_dim**-0.5 * yarn_logit_scale(attention.yarn_factor, attention.yarn_mscale)
        self.train_indexer = indexer.train
        self.indexer_loss: Tensor | None = None
        self.register_load_state_dict_pre_hook(_take_checkpoint)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the matrices from N(0, 1 / fan_in)."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5)

    def make_cache(self, sequences: int, *, pages: int = 0, max_pages: int | None = None) -> PagedCache:
        """Return an empty cache of this layer for a number of sequences; the other arguments are `PagedCache`'s."""
        return PagedCache(
            self._pools(),
            sequences=sequences,
            page_size=self.config[0].page_size,
            pages=pages,
            max_pages=max_pages,
            device=self.q_a_proj.weight.device,
        )

    def _pools(self) -> dict[str, tuple[int, torch.dtype]]:
        """Return name -> (row width, dtype) of what a cache keeps."""
        dtype = self.q_a_proj.weight.dtype
        pools = {"rows": (self.row_heads * self.row_width, dtype)}
        if self.indexer is not None:
            options = self.indexer.config
            pools["keys"] = pool_of_rows(options.quantization, options.head_dim, dtype)
        return pools

    def __getstate__(self) -> dict[str, Any]:
        # a copy of the layer has no last call, and the graph that hangs on its loss cannot be copied
        return {**self.__dict__, "indexer_loss": None}

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: PagedCache | None = None,
        topk_indices: Tensor | None = None,
        *,
        return_indices: bool = False,
    ) -> Any:
        """Attend.

        Args:
            hidden_states: `[B, S, H]`.
            attention_mask: `[B, S]`, or `[B, earlier + S]` of which the last S columns are read; 0 or False = padding,
                anywhere. A padded token is in nobody's keys, not in the cache, and comes out as zeros.
            position_ids: `[B, S]` or `[1, S]`: rotary positions; None = the number of real tokens before.
            cache: of `make_cache`, with B sequences: this call's tokens follow those in it, and are added to it.
            topk_indices: `[B, S, K]` int32 or int64: attend to these instead of asking the indexer. A place behind the
                token is an error on a CPU and in checked mode (MEGAMOE_CHECK=1).
            return_indices: return a pair, of which the second can be another layer's `topk_indices`.

        Returns:
            `[B, S, H]` in the dtype of hidden_states; and, if asked for, `[B, S, K]` int32: the kept tokens by their
            place among the real tokens of their sequence, -1 = none.

        A call that ends early, by an exception of any kind, leaves none of its tokens in the cache.

        Raises:
            ValueError: shapes or dtypes that do not fit, a cache of another layer's kind; the cache has not changed.
            MegaMoeError: a gradient is asked for and the cache holds earlier tokens, which have none; or neither an
                indexer nor indices are there.
        """
        check_hidden_states(hidden_states, self.hidden)
        if self.indexer is None and topk_indices is None:
            raise MegaMoeError("this layer shares the indexer of an earlier one; give it topk_indices of that layer")
        layout = self._layout(hidden_states, attention_mask, cache)
        x = layout.pack(hidden_states)
        cos, sin = self._rope(layout, position_ids)
        given = None if topk_indices is None else layout.pack_choice(topk_indices, layout.position + 1)
        q_latent = self.q_a_layernorm(self.q_a_proj(x.to(self.q_a_proj.weight.dtype)))
        x = x.to(q_latent.dtype)
        held = [] if cache is None else list(cache.host_lengths)
        try:
            keys = self._keys(layout, x, cos, sin, cache)
            index = self._choose(layout, x, q_latent, cos, sin, keys) if given is None else given
            out = self._attend_all(layout, x, q_latent, cos, sin, keys, index)
            result = layout.unpack(out.to(hidden_states.dtype))
            return (result, layout.unpack(index.int(), -1)) if return_indices else result
        except BaseException:  # Ctrl-C too
            if cache is not None:
                cache.take_back(held)
            raise

    # ---- what may be attended to ------------------------------------------------------------------------------------

    def _layout(self, x: Tensor, attention_mask: Tensor | None, cache: PagedCache | None) -> TokenLayout:
        batch, length, _ = x.shape
        if cache is None:
            return TokenLayout.of((batch, length), attention_mask, None, x.device)
        if not isinstance(cache, PagedCache):
            raise ValueError(f"cache: must be a PagedCache of make_cache, got {type(cache).__name__}")
        if cache.sequences != batch:
            raise ValueError(f"cache: must be for the {batch} sequences of hidden_states, is for {cache.sequences}")
        cache.check_pools(self._pools(), x.device)
        if any(cache.host_lengths) and torch.is_grad_enabled():
            if x.requires_grad or any(p.requires_grad for p in self.parameters()):
                raise MegaMoeError(
                    "a gradient is asked for and the cache holds earlier tokens, which have none; use torch.no_grad() "
                    "for decoding, or train on whole sequences"
                )
        return TokenLayout.of((batch, length), attention_mask, cache.host_lengths, x.device)

    def _rope(self, layout: TokenLayout, position_ids: Tensor | None) -> tuple[Tensor, Tensor]:
        config = self.config[0]
        positions = layout.position
        if position_ids is not None:
            batch, length = layout.shape
            shape = list(position_ids.shape) if isinstance(position_ids, Tensor) else type(position_ids).__name__
            if shape not in ([batch, length], [1, length], [length]):
                raise ValueError(f"position_ids: must be [{batch}, {length}] or [1, {length}], got {shape}")
            positions = layout.pack(position_ids.expand(layout.shape))
        return rope_tables(positions, rope_of(config, positions.device))

    def _keys(self, layout: TokenLayout, x: Tensor, cos: Tensor, sin: Tensor, cache: PagedCache | None) -> _Keys:
        """Make the rows and indexer keys of this call's tokens, and put them into the cache."""
        rows = self._rows(x, cos, sin)
        index_keys = None
        if self.indexer is not None:
            # the gradient of the indexer's own loss stops at its inputs
            with torch.set_grad_enabled(torch.is_grad_enabled() and self._trains_indexer):
                index_keys = self.indexer.keys(x.detach(), cos, sin)
        starts = layout.first_tokens()[layout.sequence]
        if cache is None:
            return _Keys(rows, index_keys, starts, None)
        cache.extend(layout.counts)
        slots = cache.slots(layout.sequence, layout.position)
        cache.write("rows", slots, rows.flatten(1))
        if self.indexer is not None and index_keys is not None:
            options = self.indexer.config
            write_rows(cache.pools["keys"], slots, index_keys, options.quantization, hadamard=options.hadamard)
        if not any(layout.before):
            return _Keys(rows, index_keys, starts, None)
        pool = cache.rows("rows").view(-1, self.row_heads, self.row_width)
        return _Keys(pool, index_keys, starts, cache)

    def _rows(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return what the cache keeps of tokens: `[N, G, W]`."""
        style, turned = self.config[0].rope, self.config[0].rope_dim
        if self.config[0].kind == "mla":
            latent, rope = self.kv_a_proj_with_mqa(x).split([self.latent, turned], dim=-1)
            return torch.cat([self.kv_a_layernorm(latent), apply_rope(rope, cos, sin, style)], dim=-1).unsqueeze(1)
        key = self.k_proj(x).view(-1, self.row_heads, self.value)
        value = self.v_proj(x).view(-1, self.row_heads, self.value)
        return torch.cat([apply_rope(key[..., :turned], cos, sin, style), key[..., turned:], value], dim=-1)

    # ---- which of it ------------------------------------------------------------------------------------------------

    @property
    def _trains_indexer(self) -> bool:
        return self.train_indexer and self.training

    @torch.no_grad()
    def _choose(
        self, layout: TokenLayout, x: Tensor, q_latent: Tensor, cos: Tensor, sin: Tensor, keys: _Keys
    ) -> Tensor:
        """Return the kept keys `[N, K]` int32, as places in their sequence."""
        indexer = self.indexer
        assert indexer is not None and keys.index_keys is not None
        if keys.cache is not None and indexer.can_page(layout.counts):
            shape = (keys.cache.sequences, -1)
            q = indexer.queries(q_latent, cos, sin).unflatten(0, shape)
            lengths = (layout.position + 1).int().view(shape)
            return indexer.select_paged(q, keys.cache.pools["keys"], indexer.weights(x), lengths, keys.cache)
        index_keys = indexer.encode(keys.index_keys)
        starts = keys.starts
        if keys.cache is not None:
            index_keys, first = self._cached_keys(keys.cache)
            starts = first[layout.sequence]
        ends = starts + (layout.position + 1).int()
        parts = []
        for segment in _in_parts(layout.segments()):
            at, window = slice(segment[0], segment[1]), slice(segment[2], segment[3])
            q = indexer.queries(q_latent[at], cos[at], sin[at])
            shifted = (starts[at] - segment[2], ends[at] - segment[2])
            parts.append(indexer.select(q, index_keys.part(window), indexer.weights(x[at]), *shifted))
        return torch.cat(parts) if parts else layout.position.new_empty(0, indexer.config.top_k, dtype=torch.int32)

    def _cached_keys(self, cache: PagedCache) -> tuple[IndexRows, Tensor]:
        """Return the indexer's keys of all sequences, one after the other, and `[B]` int32: where each begins."""
        assert self.indexer is not None
        total = sum(cache.host_lengths)
        behind = cache.lengths.cumsum(0)
        first = behind - cache.lengths
        sequence = torch.arange(cache.sequences, device=behind.device).repeat_interleave(
            cache.lengths, output_size=total
        )
        slots = cache.slots(sequence, torch.arange(total, device=behind.device) - first[sequence])
        return read_rows(cache.pools["keys"], slots, self.indexer.config.quantization), first.int()

    # ---- attention --------------------------------------------------------------------------------------------------

    def _attend_all(
        self,
        layout: TokenLayout,
        x: Tensor,
        q_latent: Tensor,
        cos: Tensor,
        sin: Tensor,
        keys: _Keys,
        index: Tensor,
    ) -> Tensor:
        """Return the attention's output of all tokens, `[N, H]`."""
        self.indexer_loss = None
        if torch.is_grad_enabled():
            rows = self._rows_at(layout, keys, index, slice(None))
            wants_loss = self._trains_indexer and self.indexer is not None
            out, weights = self._attend(q_latent, cos, sin, keys.rows, rows, with_weights=wants_loss)
            if weights is not None:
                self.indexer_loss = self._loss(x, q_latent, cos, sin, keys, rows, weights)
            return out
        out = x.new_empty(x.shape[0], self.hidden)
        for first in range(0, x.shape[0], _PART):
            at = slice(first, first + _PART)
            rows = self._rows_at(layout, keys, index, at)
            out[at] = self._attend(q_latent[at], cos[at], sin[at], keys.rows, rows, with_weights=False)[0]
        return out

    def _rows_at(self, layout: TokenLayout, keys: _Keys, index: Tensor, at: slice) -> Tensor:
        """Return where the kept keys of some tokens stand in `keys.rows`: `[n, K]`, -1 = none."""
        place = index[at]
        if keys.cache is None:
            return torch.where(place < 0, -1, place + keys.starts[at].unsqueeze(1))
        slots = keys.cache.slots(layout.sequence[at].unsqueeze(1), place.clamp(min=0).long())
        return torch.where(place < 0, -1, slots)

    def _attend(
        self, q_latent: Tensor, cos: Tensor, sin: Tensor, rows: Tensor, index: Tensor, *, with_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output of some tokens, `[n, H]`, and the softmax weights summed over heads, `[n, K]`."""
        config = self.config[0]
        q = self.q_b_proj(q_latent).view(-1, config.heads, config.query_dim)
        if config.kind == "gqa":
            turned = apply_rope(q[..., : config.rope_dim], cos, sin, config.rope)
            q = torch.cat([turned, q[..., config.rope_dim :]], dim=-1)
            out, weights = self._sparse(q, rows, index, with_weights)
        else:
            up = self.kv_b_proj.weight.view(config.heads, self.nope + self.value, self.latent)
            up_key, up_value = up.split([self.nope, self.value], dim=1)
            plain, turned = q.split([self.nope, config.rope_dim], dim=-1)
            absorbed = torch.bmm(plain.transpose(0, 1), up_key).transpose(0, 1)
            q = torch.cat([absorbed, apply_rope(turned, cos, sin, config.rope)], dim=-1)
            latents, weights = self._sparse(q, rows, index, with_weights)
            out = torch.bmm(latents.transpose(0, 1), up_value.transpose(1, 2)).transpose(0, 1)
        return self.o_proj(out.flatten(1)), weights

    def _sparse(self, q: Tensor, rows: Tensor, index: Tensor, with_weights: bool) -> tuple[Tensor, Tensor | None]:
        # autocast makes queries of another dtype than the rows of a cache
        return sparse_attention(q.to(rows.dtype), rows, index, self.cut, scale=self.scale, with_weights=with_weights)

    def _loss(
        self, x: Tensor, q_latent: Tensor, cos: Tensor, sin: Tensor, keys: _Keys, index: Tensor, weights: Tensor
    ) -> Tensor:
        assert self.indexer is not None and keys.index_keys is not None
        q = self.indexer.queries(q_latent.detach(), cos, sin)
        scores = self.indexer.scores(q, keys.index_keys, self.indexer.weights(x.detach()), index)
        predicted = F.log_softmax(scores.masked_fill(index < 0, -torch.inf), dim=-1).masked_fill(index < 0, 0.0)
        target = weights / self.config[0].heads
        # a call without tokens has nothing to learn from, and a mean of nothing is NaN
        return (torch.xlogy(target, target) - target * predicted).sum() / max(1, target.shape[0])

    def extra_repr(self) -> str:
        config = self.config[0]
        return (
            f"hidden={self.hidden}, {config.kind}, heads={config.heads}, query_dim={config.query_dim}, "
            f"row={self.row_heads}x{self.row_width}, rope={config.rope}, theta={config.rope_theta:g}"
        )


def check_hidden_states(x: Tensor, hidden: int) -> None:
    """Refuse what is not floating `[B, S, hidden]`."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        got = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"hidden_states: must be a floating tensor, got {got}")
    if x.dim() != 3 or x.shape[2] != hidden:
        raise ValueError(f"hidden_states: must be [B, S, {hidden}], got {list(x.shape)}")


def rope_of(config: AttentionConfig, device: torch.device) -> Tensor:
    """Return the rotary frequencies of a configuration, `[rope_dim / 2]` FP32."""
    return rope_frequencies(
        config.rope_dim,
        config.rope_theta,
        yarn_factor=config.yarn_factor,
        yarn_context=config.yarn_context,
        yarn_fast=config.yarn_fast,
        yarn_slow=config.yarn_slow,
        device=device,
    )


def _required(config: AttentionConfig, name: str) -> int:
    """Return a size that the configuration's own check has made sure of."""
    value = getattr(config, name)
    assert isinstance(value, int)
    return value


def _in_parts(segments: list[Segment]) -> list[Segment]:
    """Split segments so that none has more than `_PART` queries."""
    return [
        (begin, min(begin + _PART, last), key_first, key_last)
        for first, last, key_first, key_last in segments
        for begin in range(first, last, _PART)
    ]


def _take_checkpoint(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    rename_and_dequantize(state, prefix, DEEPSEEK_NAMES)
