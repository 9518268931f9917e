"""DeepSeek-V4's compressed sparse attention: a sliding window, and the entries that an indexer keeps.

Shape letters: B sequences, S tokens of a sequence in this call, N real tokens of all sequences, E entries that they
complete, H hidden, A heads, D width of a head, I indexer heads, K kept entries.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megamoe.config import IndexerConfig, MoEConfig
from megamoe.errors import ConfigError, MegaMoeError
from megamoe.kernels.index_rows import IndexRows, pool_of_rows, read_rows, write_rows
from megamoe.kernels.rope import rope_tables
from megamoe.kernels.sparse_attention import RowCut, sparse_attention
from megamoe.layers.attention_checkpoint import rename_and_dequantize
from megamoe.layers.compressed_cache import DECODE_TOKENS, CompressedCache
from megamoe.layers.compressor import RATIO, Completed, Compressor, turn_tail
from megamoe.layers.indexer_attention import attention_sections, check_hidden_states, rope_of
from megamoe.layers.scorer import Scorer
from megamoe.layers.token_layout import TokenLayout

__all__ = ["CompressedAttention", "CompressedIndexer"]

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
_PART = 1024  # queries that are scored and attended at a time without gradients

# DeepSeek's name -> transformers' name, which is the module's
DEEPSEEK_NAMES = {
    "wq_a": "q_a_proj",
    "q_norm": "q_a_norm",
    "wq_b": "q_b_proj",
    "wkv": "kv_proj",
    "wo_a": "o_a_proj",
    "wo_b": "o_b_proj",
    "attn_sink": "sinks",
    "compressor.wkv": "compressor.kv_proj",
    "compressor.wgate": "compressor.gate_proj",
    "compressor.ape": "compressor.position_bias",
    "compressor.norm": "compressor.kv_norm",
    "indexer.wq_b": "compressor.indexer.q_b_proj",
    "indexer.weights_proj": "compressor.indexer.scorer.weights_proj",
    "indexer.compressor.wkv": "compressor.indexer.kv_proj",
    "indexer.compressor.wgate": "compressor.indexer.gate_proj",
    "indexer.compressor.ape": "compressor.indexer.position_bias",
    "indexer.compressor.norm": "compressor.indexer.kv_norm",
}


class CompressedIndexer(Scorer, Compressor):
    """The indexer over compressed entries: its keys are entries of its own, the scorer is `Indexer`'s.

    Parameters, beside the compressor's:
        q_b_proj.weight: `[I * D, q_lora]`.
        scorer.weights_proj.weight: `[I, H]`.

    Args:
        config: section `indexer`; D is its `head_dim`.
        hidden: H.
        q_lora: width of the latent of queries.
        eps: of the norm.
        dtype: of the projections.
        device: where parameters live.
    """

    def __init__(
        self,
        config: IndexerConfig,
        hidden: int,
        q_lora: int,
        eps: float,
        *,
        dtype: torch.dtype,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(hidden, config.head_dim, eps, dtype=dtype, device=device)
        self.config = config
        self.q_b_proj = nn.Linear(q_lora, config.heads * config.head_dim, bias=False, dtype=dtype, device=device)
        self.scorer = nn.Module()
        self.scorer.weights_proj = nn.Linear(hidden, config.heads, bias=False, dtype=dtype, device=device)

    def queries(self, q_latent: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return the queries `[N, I, D]` of latents `[N, q_lora]`; cos and sin `[N, rope_dim / 2]` FP32."""
        return turn_tail(self.q_b_proj(q_latent).view(-1, self.config.heads, self.config.head_dim), cos, sin)

    def weights(self, x: Tensor) -> Tensor:
        """Return the heads' weights `[N, I]` FP32 of tokens `[N, H]`, both factors of the score included."""
        projected: Tensor = self.scorer.weights_proj(x)  # type: ignore[operator]
        return projected.float() * (self.config.heads * self.config.head_dim) ** -0.5


class _Source(NamedTuple):
    """What the queries of one call may attend to.

    Attributes:
        rows: `[R, 1, D]`.
        keys: the indexer's keys of this call's entries, encoded.
        cache: where the entries of earlier calls are too, or None when there are none.
        rows_of_entries: a function of (sequence, place) -> rows.
        rows_of_tokens: a function of (sequence, position) -> rows.
    """

    rows: Tensor
    keys: IndexRows
    cache: CompressedCache | None
    rows_of_entries: Any
    rows_of_tokens: Any


class CompressedAttention(nn.Module):
    """Causal attention of each query to the last `window` tokens and to `top_k` compressed entries.

    One row per token or entry is key and value of all heads. Queries and rows are turned in their last elements, and
    the output is turned back, so that what a row brings depends on its distance alone. A sink per head takes part in
    the softmax. The entries of a query are those whose tokens are all at or before it.

    Sequences are counted in real tokens: padding is in no window and no entry.

    Parameters have the names of transformers' checkpoints; DeepSeek's names, and FP8 matrices with scales in `*.scale`,
    are taken by `load_state_dict` too (docs/indexer.md):
        q_a_proj.weight: `[q_lora, H]`; q_a_norm.weight: `[q_lora]` FP32; q_b_proj.weight: `[A * D, q_lora]`.
        kv_proj.weight: `[D, H]`; kv_norm.weight: `[D]` FP32.
        sinks: `[A]` FP32.
        o_a_proj.weight: `[G * output_lora, A * D / G]`, G = output_groups; o_b_proj.weight: `[H, G * output_lora]`.
        compressor.*: see `Compressor`; compressor.indexer.*: see `CompressedIndexer`.

    Args:
        config: the whole configuration; `indexer`, `attention`, `model.hidden` and `model.dtype` are read.
        device: where parameters live; None = torch's default device.

    Raises:
        ConfigError: no such sections, or another `attention.kind`.
    """

    def __init__(self, config: MoEConfig, *, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.config = attention, indexer = attention_sections(config)
        if attention.kind != "compressed":
            raise ConfigError(
                f"attention.kind={attention.kind} is IndexerAttention's; CompressedAttention takes compressed"
            )
        assert attention.head_dim and attention.window and attention.output_groups and attention.output_lora
        self.hidden = hidden = config.model.hidden
        self.width, self.window, self.groups = attention.head_dim, attention.window, attention.output_groups
        dtype, eps = _DTYPES[config.model.dtype], attention.norm_eps
        all_heads = attention.heads * self.width

        def linear(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=False, dtype=dtype, device=device)

        def norm(width: int) -> nn.RMSNorm:
            return nn.RMSNorm(width, eps=eps, dtype=torch.float32, device=device)

        self.q_a_proj = linear(hidden, attention.q_lora)
        self.q_a_norm = norm(attention.q_lora)
        self.q_b_proj = linear(attention.q_lora, all_heads)
        self.kv_proj = linear(hidden, self.width)
        self.kv_norm = norm(self.width)
        self.o_a_proj = linear(all_heads // self.groups, self.groups * attention.output_lora)
        self.o_b_proj = linear(self.groups * attention.output_lora, hidden)
        self.sinks = nn.Parameter(torch.zeros(attention.heads, dtype=torch.float32, device=device))
        self.compressor = Compressor(hidden, self.width, eps, dtype=dtype, device=device)
        self.compressor.indexer = CompressedIndexer(indexer, hidden, attention.q_lora, eps, dtype=dtype, device=device)
        self.register_load_state_dict_pre_hook(_take_checkpoint)
        self.reset_parameters()

    @property
    def indexer(self) -> CompressedIndexer:
        """The indexer, which checkpoints have inside the compressor."""
        indexer = self.compressor.indexer
        assert isinstance(indexer, CompressedIndexer)
        return indexer

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the matrices from N(0, 1 / fan_in)."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5)

    def make_cache(self, sequences: int, *, pages: int = 0, max_pages: int | None = None) -> CompressedCache:
        """Return an empty cache of this layer for a number of sequences; the other arguments are `PagedCache`'s."""
        weight = self.q_a_proj.weight
        return CompressedCache(
            *self._pools(),
            ratio=RATIO,
            window=self.window,
            sequences=sequences,
            page_size=self.config[0].page_size,
            pages=pages,
            max_pages=max_pages,
            device=weight.device,
        )

    def _pools(self) -> tuple[dict[str, tuple[int, torch.dtype]], dict[str, tuple[int, torch.dtype]]]:
        """Return name -> (row width, dtype) of what a cache keeps of entries, and of the latest tokens."""
        dtype, options = self.q_a_proj.weight.dtype, self.indexer.config
        return (
            {"rows": (self.width, dtype), "keys": pool_of_rows(options.quantization, options.head_dim, dtype)},
            {"of_rows": (4 * self.width, dtype), "of_keys": (4 * options.head_dim, dtype)},
        )

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        cache: CompressedCache | None = None,
        topk_indices: Tensor | None = None,
        *,
        return_indices: bool = False,
    ) -> Any:
        """Attend.

        Args:
            hidden_states: `[B, S, H]`.
            attention_mask: `[B, S]`, or `[B, earlier + S]` of which the last S columns are read; 0 or False = padding.
            cache: of `make_cache`, with B sequences: this call's tokens follow those in it, and are added to it.
            topk_indices: `[B, S, K]` int32 or int64: attend to these entries instead of asking the indexer. An entry
                that is not complete at the token is an error on a CPU and in checked mode (MEGAMOE_CHECK=1).
            return_indices: return a pair.

        Returns:
            `[B, S, H]` in the dtype of hidden_states, zeros where padding is; and, if asked for, `[B, S, K]` int32: the
            kept entries by their place in the sequence, -1 = none.

        A call that ends early, by an exception of any kind, leaves none of its tokens in the cache if it had not begun
        to write there; otherwise its sequences must be reset, which the next call says.

        Raises:
            ValueError: shapes or dtypes that do not fit, a cache of another layer's kind; the cache has not changed.
            MegaMoeError: a gradient is asked for and the cache holds earlier tokens, which have none; or a call that
                ended early has torn a sequence of the cache.
        """
        check_hidden_states(hidden_states, self.hidden)
        layout = self._layout(hidden_states, attention_mask, cache)
        x = layout.pack(hidden_states).to(self.q_a_proj.weight.dtype)
        cos, sin = rope_tables(layout.position, rope_of(self.config[0], x.device))
        given = None if topk_indices is None else layout.pack_choice(topk_indices, (layout.position + 1) // RATIO)
        q_latent = _rms(self.q_a_proj(x), self.q_a_norm)
        held = ([], []) if cache is None else (list(cache.host_lengths), list(cache.pages.host_lengths))
        try:
            source = self._source(layout, x, turn_tail(_rms(self.kv_proj(x), self.kv_norm), cos, sin), cache)
            index = self._choose(layout, x, q_latent, cos, sin, source) if given is None else given
            out = self._attend_all(layout, x, q_latent, cos, sin, source, index)
            result = layout.unpack(out.to(hidden_states.dtype))
            return (result, layout.unpack(index.int(), -1)) if return_indices else result
        except BaseException:  # Ctrl-C too
            if cache is not None:
                cache.take_back(*held)
            raise

    def _layout(self, x: Tensor, attention_mask: Tensor | None, cache: CompressedCache | None) -> TokenLayout:
        batch, length, _ = x.shape
        if cache is None:
            return TokenLayout.of((batch, length), attention_mask, None, x.device)
        if not isinstance(cache, CompressedCache):
            raise ValueError(f"cache: must be a CompressedCache of make_cache, got {type(cache).__name__}")
        if cache.sequences != batch:
            raise ValueError(f"cache: must be for the {batch} sequences of hidden_states, is for {cache.sequences}")
        cache.pages.check_pools(self._pools()[0], x.device)
        if cache.ring != self.window + DECODE_TOKENS:
            raise ValueError(
                f"cache: must be for a window of {self.window} tokens, is for {cache.ring - DECODE_TOKENS}; make it "
                f"with make_cache of this layer"
            )
        wants_gradient = x.requires_grad or any(p.requires_grad for p in self.parameters())
        if any(cache.host_lengths) and torch.is_grad_enabled() and wants_gradient:
            raise MegaMoeError(
                "a gradient is asked for and the cache holds earlier tokens, which have none; use torch.no_grad() "
                "for decoding, or train on whole sequences"
            )
        return TokenLayout.of((batch, length), attention_mask, cache.host_lengths, x.device)

    def _source(self, layout: TokenLayout, x: Tensor, rows: Tensor, cache: CompressedCache | None) -> _Source:
        """Make rows, entries and indexer keys of this call's tokens, put them into the cache, and find the earlier."""
        done = Completed.of(layout)
        frequencies = rope_of(self.config[0], x.device)
        projected = {"of_rows": self.compressor.project(x)}
        with torch.no_grad():
            projected["of_keys"] = self.indexer.project(x)
        earlier = any(layout.before)
        recent = {name: cache.recent[name] if cache is not None and earlier else None for name in projected}
        entries = self.compressor.entries(recent["of_rows"], projected["of_rows"], done, frequencies)
        with torch.no_grad():
            keys = self.indexer.entries(recent["of_keys"], projected["of_keys"], done, frequencies)
        if cache is not None:
            cache.extend(layout.counts)
            slots = cache.entry_slots(done.sequence, done.place)
            cache.pages.write("rows", slots, entries)
            options = self.indexer.config
            write_rows(cache.pages.pools["keys"], slots, keys, options.quantization, hadamard=options.hadamard)
            if not earlier or max(layout.counts) <= DECODE_TOKENS:
                cache.remember(layout, rows, projected)
        first_token, before = (
            layout.first_tokens().long(),
            torch.tensor(layout.before, dtype=torch.int64, device=x.device),
        )
        if cache is None or not earlier:
            first_entry = _starts(done.counts, x.device)
            return _Source(
                torch.cat([rows, entries]).unsqueeze(1),
                self.indexer.encode(keys),
                None,
                lambda sequence, place: first_entry[sequence] + place + rows.shape[0],
                lambda sequence, position: first_token[sequence] + position,
            )
        encoded = self.indexer.encode(keys)
        pool = cache.pages.rows("rows")
        if max(layout.counts) <= DECODE_TOKENS:
            return _Source(pool.unsqueeze(1), encoded, cache, cache.entry_slots, cache.ring_slots)
        # The ring is too short for these tokens: they are attended to where they are, and remembered at the end.
        both = torch.cat([pool, rows]).unsqueeze(1)
        cache.remember(layout, rows, projected)

        def rows_of_tokens(sequence: Tensor, position: Tensor) -> Tensor:
            here = first_token[sequence] + position - before[sequence] + pool.shape[0]
            return torch.where(position >= before[sequence], here, cache.ring_slots(sequence, position))

        return _Source(both, encoded, cache, cache.entry_slots, rows_of_tokens)

    @torch.no_grad()
    def _choose(
        self, layout: TokenLayout, x: Tensor, q_latent: Tensor, cos: Tensor, sin: Tensor, source: _Source
    ) -> Tensor:
        """Return the kept entries `[N, K]` int32, as places in their sequence."""
        indexer, cache = self.indexer, source.cache
        ends = ((layout.position + 1) // RATIO).int()
        if cache is not None and indexer.can_page(layout.counts):
            q = indexer.queries(q_latent, cos, sin).unflatten(0, (cache.sequences, -1))
            pool, lengths = cache.pages.pools["keys"], ends.view(cache.sequences, -1)
            return indexer.select_paged(q, pool, indexer.weights(x), lengths, cache.pages)
        keys, counts = source.keys, [count // RATIO for count in layout.counts]
        if cache is not None:
            keys, counts = self._cached_keys(cache), cache.pages.host_lengths[: cache.sequences]
        starts, parts, token, key = torch.zeros_like(ends), [], 0, 0
        for count, entries in zip(layout.counts, counts, strict=True):
            mine = keys.part(slice(key, key + entries))
            for first in range(token, token + count, _PART):
                at = slice(first, min(first + _PART, token + count))
                q = indexer.queries(q_latent[at], cos[at], sin[at])
                parts.append(indexer.select(q, mine, indexer.weights(x[at]), starts[at], ends[at]))
            token, key = token + count, key + entries
        return torch.cat(parts) if parts else ends.new_empty(0, indexer.config.top_k)

    def _cached_keys(self, cache: CompressedCache) -> IndexRows:
        """Return the indexer's keys of all sequences' entries, one after the other."""
        counts = cache.pages.host_lengths[: cache.sequences]
        number = torch.tensor(counts, dtype=torch.int64, device=cache.pages.device)
        sequence = torch.arange(cache.sequences, device=number.device).repeat_interleave(
            number, output_size=sum(counts)
        )
        place = torch.arange(sum(counts), device=number.device) - (number.cumsum(0) - number)[sequence]
        slots = cache.entry_slots(sequence, place)
        return read_rows(cache.pages.pools["keys"], slots, self.indexer.config.quantization)

    def _attend_all(
        self,
        layout: TokenLayout,
        x: Tensor,
        q_latent: Tensor,
        cos: Tensor,
        sin: Tensor,
        source: _Source,
        index: Tensor,
    ) -> Tensor:
        """Return the output of all tokens, `[N, H]`."""
        if torch.is_grad_enabled():
            return self._attend(layout, q_latent, cos, sin, source, index, slice(None))
        out = x.new_empty(x.shape[0], self.hidden)
        for first in range(0, x.shape[0], _PART):
            at = slice(first, first + _PART)
            out[at] = self._attend(layout, q_latent, cos, sin, source, index, at)
        return out

    def _attend(
        self,
        layout: TokenLayout,
        q_latent: Tensor,
        cos: Tensor,
        sin: Tensor,
        source: _Source,
        index: Tensor,
        at: slice,
    ) -> Tensor:
        """Return the output of some tokens, `[n, H]`."""
        config = self.config[0]
        cos, sin = cos[at], sin[at]
        sequence, place = layout.sequence[at].unsqueeze(1), index[at].long()
        position = layout.position[at].unsqueeze(1) - torch.arange(self.window, device=place.device)
        tokens = source.rows_of_tokens(sequence, position.clamp(min=0))
        entries = source.rows_of_entries(sequence, place.clamp(min=0))
        rows = torch.cat([torch.where(position < 0, -1, tokens), torch.where(place < 0, -1, entries)], dim=1)
        q = self.q_b_proj(q_latent[at]).view(-1, config.heads, self.width)
        q = turn_tail(F.rms_norm(q.float(), (self.width,), eps=config.norm_eps).to(q.dtype), cos, sin)
        # autocast makes queries of another dtype than the rows of a cache
        q, cut = q.to(source.rows.dtype), RowCut((0, self.width), (0, self.width))
        out, _ = sparse_attention(q, source.rows, rows, cut, scale=self.width**-0.5, sinks=self.sinks)
        out = turn_tail(out, cos, sin, inverse=True).reshape(out.shape[0], self.groups, -1)
        by_group = self.o_a_proj.weight.view(self.groups, -1, out.shape[-1])
        return self.o_b_proj(torch.bmm(out.transpose(0, 1), by_group.transpose(1, 2)).transpose(0, 1).flatten(1))

    def extra_repr(self) -> str:
        config = self.config[0]
        return (
            f"hidden={self.hidden}, compressed, heads={config.heads}, head_dim={self.width}, window={self.window}, "
            f"theta={config.rope_theta:g}"
        )


def _rms(x: Tensor, norm: nn.RMSNorm) -> Tensor:
    """Normalise in FP32, the weight's dtype, and round once."""
    return F.rms_norm(x.float(), norm.normalized_shape, norm.weight.float(), norm.eps).to(x.dtype)


def _starts(counts: list[int], device: torch.device) -> Tensor:
    """Return where each of some lists begins when they stand one after the other, `[B]` int64."""
    number = torch.tensor(counts, dtype=torch.int64, device=device)
    return number.cumsum(0) - number


def _take_checkpoint(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    rename_and_dequantize(state, prefix, DEEPSEEK_NAMES)
