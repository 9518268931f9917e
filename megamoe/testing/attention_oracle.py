"""The oracle of indexer attention: one sequence, one query after the other, float64, heads expanded.

It shares no code with the layers: rotary embeddings are products of complex numbers, keys and values of every head are
made, and the choice is a sort. Everything is differentiable but the choice.

Shape letters: S tokens, H hidden, A heads, I indexer heads, D width of an indexer head.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = [
    "AttentionTruth",
    "attention_oracle",
    "compressed_attention_oracle",
    "index_score_oracle",
    "index_size_oracle",
    "rotate",
]


class AttentionTruth(NamedTuple):
    """What the oracle says about one sequence.

    Attributes:
        out: `[S, H]` float64.
        scores: `[S, keys]` float64: the indexer's score of each key for each query, without a causal mask. Keys are
            tokens, or compressed entries.
        kept: the kept keys of each query, ascending.
        indexer_loss: mean over queries of KL(attention averaged over heads || softmax of the kept scores).
        score_sizes: `[S, keys]` float64: what a score's heads amount to, see `index_size_oracle`.
    """

    out: Tensor
    scores: Tensor
    kept: list[list[int]]
    indexer_loss: Tensor
    score_sizes: Tensor


def rotate(x: Tensor, positions: Tensor, style: str, options: Mapping[str, Any], *, inverse: bool = False) -> Tensor:
    """Turn `[S, ..., R]` float64 by positions `[S]`; `options` are `AttentionConfig`'s rotary fields by name."""
    dim = x.shape[-1]
    theta, factor, context = options["rope_theta"], options["yarn_factor"], options["yarn_context"]
    angles = []
    for i in range(dim // 2):
        rate = theta ** (-2 * i / dim)
        if factor != 1:
            low = max(math.floor(_pair_that_turns(options["yarn_fast"], dim, theta, context)), 0)
            high = min(math.ceil(_pair_that_turns(options["yarn_slow"], dim, theta, context)), dim - 1)
            share = min(max((i - low) / (high - low if high > low else 1e-3), 0), 1)
            rate = rate * (1 - share) + rate / factor * share
        angles.append(positions.double() * rate)
    angle = torch.stack(angles, -1).view(len(positions), *(1,) * (x.dim() - 2), dim // 2)
    turn = torch.polar(torch.ones_like(angle), -angle if inverse else angle)
    if style == "interleaved":
        pairs = torch.view_as_complex(x.unflatten(-1, (dim // 2, 2)).contiguous())
        return torch.view_as_real(pairs * turn).flatten(-2)
    turned = torch.complex(x[..., : dim // 2], x[..., dim // 2 :]) * turn
    return torch.cat([turned.real, turned.imag], -1)


def _pair_that_turns(turns: float, dim: int, theta: float, context: int) -> float:
    """Return the (broken) index i of the pair that turns so often: theta^(-2i / dim) * context = 2 pi * turns."""
    return dim / 2 * math.log(context / (2 * math.pi * turns), theta)


def _rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def index_score_oracle(q: Tensor, k: Tensor, weights: Tensor) -> Tensor:
    """Return sum over heads of weight * relu(q . k): `[S, I, D]`, `[T, D]`, `[S, I]` -> `[S, T]`."""
    total = torch.zeros(q.shape[0], k.shape[0], dtype=torch.float64)
    for head in range(q.shape[1]):
        total = total + weights[:, head, None] * torch.relu(q[:, head] @ k.T)
    return total


def index_size_oracle(q: Tensor, k: Tensor, weights: Tensor) -> Tensor:
    """Return the root of sum over heads of (weight * |q| * |k|)^2 / D, `[S, T]`; arguments as of `index_score_oracle`.

    It is the root mean square of a sum of heads whose queries point anywhere. What rounding the operands does to a
    score is in proportion to it, also where heads of both signs leave a small score.
    """
    heads = (weights.square() * q.square().sum(-1)).sum(1)
    return (heads[:, None] * k.square().sum(-1)[None, :] / k.shape[1]).sqrt()


def attention_oracle(
    x: Tensor,
    parameters: Mapping[str, Tensor],
    attention: Mapping[str, Any],
    indexer: Mapping[str, Any],
    *,
    positions: Tensor | None = None,
    kept: list[list[int]] | None = None,
) -> AttentionTruth:
    """Return what `IndexerAttention` must return for one sequence without padding.

    Args:
        x: `[S, H]` float64.
        parameters: of the layer, by its names, float64.
        attention, indexer: the sections of the configuration, as dictionaries.
        positions: `[S]`, or None for 0, 1, ...
        kept: the keys of each query, instead of the indexer's choice.
    """
    count = x.shape[0]
    positions = torch.arange(count) if positions is None else positions
    heads, turned, eps = attention["heads"], attention["rope_dim"], attention["norm_eps"]
    latent_q = _rms(x @ parameters["q_a_proj.weight"].T, parameters["q_a_layernorm.weight"], eps)
    scores, sizes = _index_scores(x.detach(), latent_q.detach(), parameters, attention, indexer, positions)
    if kept is None:
        kept = [_best(scores[s, : s + 1], indexer["top_k"]) for s in range(count)]

    q = (latent_q @ parameters["q_b_proj.weight"].T).view(count, heads, -1)
    if attention["kind"] == "mla":
        plain = attention["nope_dim"]
        q = torch.cat([q[..., :plain], rotate(q[..., plain:], positions, attention["rope"], attention)], -1)
        both = x @ parameters["kv_a_proj_with_mqa.weight"].T
        latent = _rms(both[:, : attention["kv_lora"]], parameters["kv_a_layernorm.weight"], eps)
        rope = rotate(both[:, attention["kv_lora"] :], positions, attention["rope"], attention)
        up = (latent @ parameters["kv_b_proj.weight"].T).view(count, heads, -1)
        key = torch.cat([up[..., :plain], rope.unsqueeze(1).expand(-1, heads, -1)], -1)
        value = up[..., plain:]
    else:
        groups = attention["kv_heads"]
        key, value = ((x @ parameters[name].T).view(count, groups, -1) for name in ("k_proj.weight", "v_proj.weight"))
        q, key = (
            torch.cat([rotate(t[..., :turned], positions, attention["rope"], attention), t[..., turned:]], -1)
            for t in (q, key)
        )
        key, value = (t.repeat_interleave(heads // groups, 1) for t in (key, value))
    scale = q.shape[-1] ** -0.5
    if attention["yarn_factor"] != 1:
        scale *= (1 + 0.1 * attention["yarn_mscale"] * math.log(attention["yarn_factor"])) ** 2

    rows, losses = [], []
    for s in range(count):
        logits = torch.einsum("ad,tad->at", q[s], key[kept[s]]) * scale
        weights = torch.softmax(logits, -1)
        rows.append(torch.einsum("at,tad->ad", weights, value[kept[s]]).flatten())
        target = weights.detach().mean(0)
        losses.append((target * (target.log() - torch.log_softmax(scores[s, kept[s]], -1))).sum())
    out = torch.stack(rows) @ parameters["o_proj.weight"].T
    return AttentionTruth(out, scores, kept, torch.stack(losses).mean(), sizes)


def _index_scores(
    x: Tensor,
    latent_q: Tensor,
    parameters: Mapping[str, Tensor],
    attention: Mapping[str, Any],
    indexer: Mapping[str, Any],
    positions: Tensor,
) -> tuple[Tensor, Tensor]:
    turned, heads, dim = attention["rope_dim"], indexer["heads"], indexer["head_dim"]
    q = (latent_q @ parameters["indexer.wq_b.weight"].T).view(-1, heads, dim)
    k = x @ parameters["indexer.wk.weight"].T
    k = (k - k.mean(-1, keepdim=True)) / (k.var(-1, correction=0, keepdim=True) + 1e-6).sqrt()
    k = k * parameters["indexer.k_norm.weight"] + parameters["indexer.k_norm.bias"]
    q, k = (
        torch.cat([rotate(t[..., :turned], positions, indexer["rope"], attention), t[..., turned:]], -1) for t in (q, k)
    )
    weights = x @ parameters["indexer.weights_proj.weight"].T
    operands = q * dim**-0.5, k, weights * heads**-0.5
    return index_score_oracle(*operands), index_size_oracle(*operands)


def _best(scores: Tensor, top_k: int) -> list[int]:
    """Return the places of the best scores, ascending; of equal ones the lower place."""
    values = scores.tolist()
    return sorted(sorted(range(len(values)), key=lambda t: (-values[t], t))[:top_k])


def _tail_rotated(x: Tensor, positions: Tensor, attention: Mapping[str, Any], *, inverse: bool = False) -> Tensor:
    plain = x.shape[-1] - attention["rope_dim"]
    tail = rotate(x[..., plain:], positions, "interleaved", attention, inverse=inverse)
    return torch.cat([x[..., :plain], tail], -1)


def _pooled(x: Tensor, parameters: Mapping[str, Tensor], prefix: str, attention: Mapping[str, Any]) -> Tensor:
    """Return the compressed entries `[S // 4, D]`, one after the other."""
    values, gates = (x @ parameters[f"{prefix}{name}.weight"].T for name in ("kv_proj", "gate_proj"))
    bias, weight = parameters[f"{prefix}position_bias"], parameters[f"{prefix}kv_norm.weight"]
    dim, ratio = weight.numel(), bias.shape[0]
    entries = []
    for w in range(x.shape[0] // ratio):
        terms, logits = [], []
        for slot in range(ratio):
            t = w * ratio + slot
            if w > 0:
                terms.append(values[t - ratio, :dim])
                logits.append(gates[t - ratio, :dim] + bias[slot, :dim])
            terms.append(values[t, dim:])
            logits.append(gates[t, dim:] + bias[slot, dim:])
        pooled = (torch.stack(terms) * torch.softmax(torch.stack(logits), 0)).sum(0, keepdim=True)
        normed = _rms(pooled, weight, attention["norm_eps"])
        entries.append(_tail_rotated(normed, torch.tensor([w * ratio]), attention))
    return torch.cat(entries) if entries else values.new_zeros(0, dim)


def compressed_attention_oracle(
    x: Tensor,
    parameters: Mapping[str, Tensor],
    attention: Mapping[str, Any],
    indexer: Mapping[str, Any],
    *,
    kept: list[list[int]] | None = None,
) -> AttentionTruth:
    """Return what `CompressedAttention` must return for one sequence without padding; `indexer_loss` is 0.

    The arguments are those of `attention_oracle`.
    """
    count, heads, dim, eps = x.shape[0], attention["heads"], attention["head_dim"], attention["norm_eps"]
    positions = torch.arange(count)
    latent = _rms(x @ parameters["q_a_proj.weight"].T, parameters["q_a_norm.weight"], eps)
    q = (latent @ parameters["q_b_proj.weight"].T).view(count, heads, dim)
    q = _tail_rotated(_rms(q, torch.ones(dim, dtype=torch.float64), eps), positions, attention)
    token = _rms(x @ parameters["kv_proj.weight"].T, parameters["kv_norm.weight"], eps)
    token = _tail_rotated(token, positions, attention)
    entries = _pooled(x, parameters, "compressor.", attention)

    own = "compressor.indexer."
    keys = _pooled(x.detach(), parameters, own, attention)
    index_q = (latent.detach() @ parameters[f"{own}q_b_proj.weight"].T).view(count, indexer["heads"], -1)
    index_q = _tail_rotated(index_q, positions, attention) * indexer["head_dim"] ** -0.5
    weights = x.detach() @ parameters[f"{own}scorer.weights_proj.weight"].T * indexer["heads"] ** -0.5
    scores, sizes = (oracle(index_q, keys, weights) for oracle in (index_score_oracle, index_size_oracle))
    ratio = parameters["compressor.position_bias"].shape[0]
    if kept is None:
        kept = [_best(scores[s, : (s + 1) // ratio], indexer["top_k"]) for s in range(count)]

    rows = []
    for s in range(count):
        seen = torch.cat([token[max(0, s + 1 - attention["window"]) : s + 1], entries[kept[s]]])
        logits = q[s] @ seen.T * dim**-0.5
        logits = torch.cat([logits, parameters["sinks"].unsqueeze(1)], 1)
        rows.append(torch.softmax(logits, 1)[:, :-1] @ seen)
    out = _tail_rotated(torch.stack(rows), positions, attention, inverse=True)
    groups = attention["output_groups"]
    by_group = out.view(count, groups, -1)
    project = parameters["o_a_proj.weight"].view(groups, -1, by_group.shape[-1])
    out = torch.cat([by_group[:, g] @ project[g].T for g in range(groups)], -1) @ parameters["o_b_proj.weight"].T
    return AttentionTruth(out, scores, kept, torch.zeros((), dtype=torch.float64), sizes)
