"""The lightning indexer: which earlier tokens a query attends to.

Shape letters: B sequences, S tokens of a sequence, N tokens of all, H hidden, Q width of the queries' latent, I indexer
heads, D width of an indexer head, T keys, K kept keys.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megamoe.config import IndexerConfig
from megamoe.errors import ConfigError
from megamoe.kernels.index_scores import scores_at
from megamoe.kernels.mqa_checks import check_tensors
from megamoe.kernels.rope import apply_rope
from megamoe.layers.scorer import Scorer

__all__ = ["Indexer"]

_NORM_EPS = 1e-6  # of k_norm, in DeepSeek-V3.2 and GLM-5 alike, whatever the model's other norms have


class Indexer(Scorer, nn.Module):
    """Score every earlier token for every query, and keep the best `top_k`.

    score[t] = sum over heads of w[h] * relu(q[h] . k[t]) * D^-0.5 * I^-0.5, in FP32. The first `rope_dim` elements of
    queries and keys are turned. Nobody holds scores of all queries for all keys; see `megamoe.kernels.index_scores`.

    Parameters have the names of DeepSeek's and transformers' checkpoints:
        wq_b.weight: `[I * D, Q]`.
        wk.weight: `[D, H]`.
        k_norm.weight, k_norm.bias: `[D]`.
        weights_proj.weight: `[I, H]`; may be kept in FP32 in a BF16 model.

    Args:
        config: section `indexer`.
        hidden: H.
        q_lora: Q.
        rope_dim: turned elements of a head.
        dtype: of the parameters.
        device: where they live.

    Raises:
        ConfigError: rope_dim is odd or exceeds the head.
    """

    def __init__(
        self,
        config: IndexerConfig,
        hidden: int,
        q_lora: int,
        rope_dim: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if rope_dim % 2 or not 0 <= rope_dim <= config.head_dim:
            raise ConfigError(f"rope_dim: must be even and in 0..indexer.head_dim={config.head_dim}, got {rope_dim}")
        self.config, self.rope_dim = config, rope_dim

        def linear(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=False, dtype=dtype, device=device)

        self.wq_b = linear(q_lora, config.heads * config.head_dim)
        self.wk = linear(hidden, config.head_dim)
        self.k_norm = nn.LayerNorm(config.head_dim, eps=_NORM_EPS, dtype=dtype, device=device)
        self.weights_proj = linear(hidden, config.heads)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the matrices from N(0, 1 / fan_in)."""
        for module in (self.wq_b, self.wk, self.weights_proj):
            nn.init.normal_(module.weight, std=module.in_features**-0.5)
        self.k_norm.reset_parameters()

    def queries(self, q_latent: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return the queries `[N, I, D]` of latents `[N, Q]`; cos and sin `[N, rope_dim / 2]` FP32."""
        q = self.wq_b(q_latent).view(-1, self.config.heads, self.config.head_dim)
        return self._turn(q, cos, sin)

    def keys(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return the keys `[N, D]` of tokens `[N, H]`."""
        return self._turn(self.k_norm(self.wk(x)), cos, sin)

    def weights(self, x: Tensor) -> Tensor:
        """Return the heads' weights `[N, I]` FP32 of tokens `[N, H]`, both factors of the score included."""
        factor = (self.config.heads * self.config.head_dim) ** -0.5
        weights: Tensor = self.weights_proj(x.to(self.weights_proj.weight.dtype)).float() * factor
        return weights

    def scores(self, q: Tensor, k: Tensor, weights: Tensor, index: Tensor) -> Tensor:
        """Return the scores of chosen keys, `[N, K]` FP32, differentiable; 0 where `index` is below 0."""
        return scores_at(q, k, weights, index)

    def forward(
        self,
        hidden_states: Tensor,
        q_latent: Tensor,
        cos: Tensor,
        sin: Tensor,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """Choose keys for whole sequences, without a cache.

        Args:
            hidden_states: `[B, S, H]`.
            q_latent: `[B, S, Q]`, the normalised latent of the attention's queries.
            cos, sin: `[B, S, rope_dim / 2]`; or `[B, S, rope_dim]` that repeats itself, as transformers has it.
            attention_mask: `[B, S]`, 0 or False = padding, or None.

        Returns:
            `[B, S, min(top_k, S)]` int32: places in the sequence, padding counted; -1 = none. Padding keeps none.

        Raises:
            ValueError: a shape outside the above.
        """
        self._check(hidden_states, q_latent, cos, sin, attention_mask)
        batch, length, _ = hidden_states.shape
        if not batch * length:
            return torch.empty(batch, length, min(self.config.top_k, length), dtype=torch.int32, device=cos.device)
        pairs = self.rope_dim // 2
        cos, sin = (table[..., :pairs].float().expand(batch, length, pairs).flatten(0, 1) for table in (cos, sin))
        x, latent = hidden_states.flatten(0, 1), q_latent.flatten(0, 1)
        # padding is taken out, so that windows are unbroken
        real = (
            hidden_states.new_ones(batch, length, dtype=torch.bool) if attention_mask is None else attention_mask != 0
        )
        keep = real.flatten().nonzero().squeeze(1)
        counts = real.sum(1).tolist()
        x, latent, cos, sin = (rows.index_select(0, keep) for rows in (x, latent, cos, sin))
        ends = torch.arange(1, keep.numel() + 1, dtype=torch.int32, device=keep.device)
        first = torch.tensor([sum(counts[:b]) for b in range(batch)], dtype=torch.int32, device=keep.device)
        starts = first[keep // length]
        segments = [(sum(counts[:b]), sum(counts[: b + 1])) * 2 for b in range(batch) if counts[b]]
        keys = self.encode(self.keys(x, cos, sin))
        chosen = self.select(self.queries(latent, cos, sin), keys, self.weights(x), starts, ends, segments)
        row = chosen.clamp(min=0) + starts.unsqueeze(1)
        chosen = torch.where(chosen < 0, -1, (keep % length)[row].int())
        out = chosen.new_full((batch * length, chosen.shape[1]), -1).index_copy(0, keep, chosen)
        return out.view(batch, length, -1)[..., : min(self.config.top_k, length)]

    def _check(self, x: Tensor, q_latent: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> None:
        """Refuse shapes that do not fit: flattened, tokens of one sequence would be taken for another's."""
        check_tensors(hidden_states=x, q_latent=q_latent, cos=cos, sin=sin)
        hidden, q_lora = self.wk.in_features, self.wq_b.in_features
        if x.dim() != 3 or x.shape[2] != hidden:
            raise ValueError(f"hidden_states: must be [B, S, {hidden}], got {list(x.shape)}")
        batch, length, _ = x.shape
        if tuple(q_latent.shape) != (batch, length, q_lora):
            raise ValueError(f"q_latent: must be [{batch}, {length}, {q_lora}], got {list(q_latent.shape)}")
        pairs = self.rope_dim // 2
        for name, table in (("cos", cos), ("sin", sin)):
            lead = table.shape[:-1]
            if (
                table.dim() < 1
                or table.shape[-1] < pairs
                or tuple(lead) not in ((batch, length), (1, length), (length,))
            ):
                raise ValueError(
                    f"{name}: must be [{batch}, {length}, {pairs}], [1, {length}, {pairs}] or {2 * pairs} wide, got "
                    f"{list(table.shape)}"
                )
        if mask is not None and (not isinstance(mask, Tensor) or tuple(mask.shape) != (batch, length)):
            got = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
            raise ValueError(f"attention_mask: must be [{batch}, {length}], got {got}")

    def extra_repr(self) -> str:
        config = self.config
        parts = [f"heads={config.heads}", f"head_dim={config.head_dim}", f"top_k={config.top_k}", f"rope={config.rope}"]
        if config.quantization != "none":
            parts.append(config.quantization)
        if config.hadamard:
            parts.append("hadamard")
        return ", ".join(parts)

    def _turn(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Turn the first `rope_dim` elements."""
        head, tail = x.split([self.rope_dim, x.shape[-1] - self.rope_dim], dim=-1)
        return torch.cat([apply_rope(head, cos, sin, self.config.rope), tail], dim=-1)
