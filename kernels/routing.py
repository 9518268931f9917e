"""The maths of expert selection: pure torch functions of FP32 logits, the reference of every routing kernel.

Shape letters: T tokens, E experts, G groups of E/G experts, K experts per token.

Two things are kept apart. The *choice* of experts works on keys (score plus correction bias, rounded to FP32, as the
published models do) and never carries a gradient. The *weights* are functions of the chosen logits alone; they are
evaluated as logarithms in FP64 on [T, K] values and rounded once, so that neither underflow nor overflow of a score can
spoil a ratio: sqrt(softplus(-104)) is 2.6e-23, but its softplus is 0 in FP32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = [
    "SCORES",
    "choose_experts",
    "expert_counts",
    "load_balancing_loss",
    "log_scores",
    "lookup_experts",
    "router_logits",
    "routing_scores",
    "routing_weights",
    "stable_topk",
]

SCORES = ("softmax", "topk_softmax", "sigmoid", "sqrtsoftplus")

# Below this logit softplus(z) = exp(z) to within 2e-18, so log(softplus(z)) is z itself.
_SOFTPLUS_IS_EXP = -40.0
# stable_topk packs the column into the low bits of a 64-bit key: up to 65536 columns.
_COLUMN_BITS = 16
_COLUMN_MASK = (1 << _COLUMN_BITS) - 1
# int32 ranks of FP32 values lie in -0x7f800000 (-inf) .. 0x7f800000 (+inf); these two come after all of them.
_INT32_MIN = -(1 << 31)
_RANK_NAN = _INT32_MIN + 1
_RANK_EXCLUDED = _INT32_MIN


def router_logits(x_TH: Tensor, weight_EH: Tensor, bias_E: Tensor | None = None) -> Tensor:
    """Multiply tokens by the router's weight in FP32, whatever dtype either has, also under autocast.

    Args:
        x_TH: tokens `[num_tokens, hidden]`, any floating dtype.
        weight_EH: `[num_experts, hidden]`, any floating dtype.
        bias_E: optional logit bias `[num_experts]`.

    Returns:
        Logits `[num_tokens, num_experts]` FP32: `x.float() @ weight.float().T + bias.float()`. As any FP32 product in
        torch it follows `torch.set_float32_matmul_precision`; only the default "highest" gives full FP32.
    """
    with torch.autocast(x_TH.device.type, enabled=False):
        return F.linear(x_TH.float(), weight_EH.float(), None if bias_E is None else bias_E.float())


def routing_scores(logits_TE: Tensor, score: str) -> Tensor:
    """Return the scores that experts are chosen by, `[num_tokens, num_experts]` in the dtype of the logits.

    softmax: over all experts (Shazeer et al. 2017); topk_softmax: the logit itself (gpt-oss takes the softmax over the
    chosen ones only); sigmoid (DeepSeek-V3 report, eq. 15); sqrtsoftplus: sqrt(log(1 + exp(z))) (DeepSeek-V4).
    """
    if score == "softmax":
        return torch.softmax(logits_TE, dim=-1)
    if score == "topk_softmax":
        return logits_TE
    if score == "sigmoid":
        return torch.sigmoid(logits_TE)
    if score == "sqrtsoftplus":
        far, near = _split_far(logits_TE)
        return torch.where(far, torch.exp(logits_TE.clamp_max(0) / 2), torch.sqrt(-F.logsigmoid(-near)))
    raise _unknown_score(score)


def log_scores(logits: Tensor, score: str) -> Tensor:
    """Return log(score) elementwise, finite for every finite logit, with a finite gradient.

    For softmax and topk_softmax this is the logit: the logarithm of the score up to a constant of its row.
    """
    if score in ("softmax", "topk_softmax"):
        return logits
    if score == "sigmoid":
        return F.logsigmoid(logits)
    if score == "sqrtsoftplus":
        far, near = _split_far(logits)
        return torch.where(far, logits, torch.log(-F.logsigmoid(-near))) / 2
    raise _unknown_score(score)


def stable_topk(keys: Tensor, k: int, *, allowed: Tensor | None = None) -> Tensor:
    """Return the columns of the k largest keys of each row, largest first; of equal keys the lower column comes first.

    The answer is the same on every device and in every run, which `torch.topk` on the keys does not promise: here key
    and column are packed into one integer, so no two entries are equal and any selection algorithm finds the same ones.
    The columns of a row are distinct and in range whatever the keys are.

    Args:
        keys: `[rows, columns]` floating, rounded to FP32; at most 65536 columns. -0 equals +0. NaN sorts below -inf.
        k: how many, at most `columns`.
        allowed: optional bool `[rows, columns]`; an entry that is not allowed sorts below all others, NaN included.

    Returns:
        int64 `[rows, k]`.
    """
    columns = keys.shape[-1]
    if not 0 < k <= columns <= 1 << _COLUMN_BITS:
        raise ValueError(f"stable_topk: k must be in 1..{columns} columns (at most 65536), got k={k}")
    keys = keys.detach().float()
    # Sign and magnitude to two's complement: the integers order as the floats do, and both zeros become 0.
    bits = keys.contiguous().view(torch.int32)
    rank = torch.where(bits < 0, _INT32_MIN - bits, bits)
    rank = torch.where(torch.isnan(keys), _RANK_NAN, rank)
    if allowed is not None:
        rank = torch.where(allowed, rank, _RANK_EXCLUDED)
    column = torch.arange(columns, device=keys.device, dtype=torch.int64)
    packed = rank.to(torch.int64) * (1 << _COLUMN_BITS) + (_COLUMN_MASK - column)
    return _COLUMN_MASK - (packed.topk(k, dim=-1).values & _COLUMN_MASK)


def choose_experts(
    logits_TE: Tensor,
    *,
    score: str,
    top_k: int,
    correction_bias_E: Tensor | None = None,
    groups: int = 1,
    topk_groups: int = 1,
    group_reduce: str = "top2",
) -> Tensor:
    """Choose the experts of each token. Carries no gradient.

    The key of an expert is its score plus `correction_bias` in FP32. Without a bias the key is the logit: every score
    grows with it, and it does not saturate. With groups (DeepSeek-V2 and -V3) only the `topk_groups` groups with the
    best group score stay; an expert outside them is never chosen while they hold `top_k` experts, which may be NaN.

    Args:
        logits_TE: `[num_tokens, num_experts]` FP32.
        score: one of `SCORES`.
        top_k: experts per token.
        correction_bias_E: optional `[num_experts]` FP32, for the choice only (DeepSeek-V3 report, eq. 16).
        groups: number of equal groups of neighbouring experts; 1 = no groups.
        topk_groups: groups that a token may use.
        group_reduce: group score from the keys score + bias: "top2" the sum of its two best, "max" its best.

    Returns:
        int64 `[num_tokens, top_k]`, best key first, ties to the lower index; a NaN logit counts as the lowest. The ids
        of a token are distinct and in range even if all its logits are NaN.
    """
    logits_TE = logits_TE.detach()
    if correction_bias_E is None and groups == 1:
        return stable_topk(logits_TE, top_k)
    # One NaN must not spoil the softmax, and with it the choice among the other experts.
    is_nan_TE = torch.isnan(logits_TE)
    scores_TE = routing_scores(torch.where(is_nan_TE, -torch.inf, logits_TE), score)
    keys_TE = logits_TE
    if correction_bias_E is not None:
        scores_TE = scores_TE + correction_bias_E.detach()
        keys_TE = torch.where(is_nan_TE, torch.nan, scores_TE)
    if groups == 1:
        return stable_topk(keys_TE, top_k)
    # The softmax of a row of -inf is NaN.
    excluded_TE = is_nan_TE | torch.isnan(scores_TE)
    grouped_TGN = torch.where(excluded_TE, -torch.inf, scores_TE).unflatten(-1, (groups, -1))
    if group_reduce == "top2":
        group_scores_TG = grouped_TGN.topk(2, dim=-1).values.sum(-1)
    elif group_reduce == "max":
        group_scores_TG = grouped_TGN.amax(-1)
    else:
        raise ValueError(f"group_reduce: must be 'top2' or 'max', got {group_reduce!r}")
    best_TJ = stable_topk(group_scores_TG, topk_groups)
    kept_TG = torch.zeros_like(group_scores_TG, dtype=torch.bool).scatter(1, best_TJ, True)
    kept_TE = kept_TG.unsqueeze(-1).expand(grouped_TGN.shape).flatten(1)
    return stable_topk(keys_TE, top_k, allowed=kept_TE)


def lookup_experts(table_VK: Tensor, input_ids_T: Tensor) -> Tensor:
    """Return `table[input_ids]`, int64 `[num_tokens, top_k]`, as DeepSeek-V4's hash layers do; -1 for a negative id."""
    ids_TK = table_VK[input_ids_T.long().clamp_min(0)]
    return torch.where((input_ids_T >= 0).unsqueeze(-1), ids_TK, -1)


def routing_weights(logits_TE: Tensor, ids_TK: Tensor, *, score: str, renormalize: bool, scale: float = 1.0) -> Tensor:
    """Return the weights of the chosen experts: their scores without any correction bias, differentiable.

    renormalize divides by the sum over the chosen experts; the sum is taken relative to its largest term and floored,
    so it is never 0/0 and the ratios are right where the scores themselves underflow. Where every chosen score is
    exactly 0 (logits of -inf) the weights are 0. `scale` comes last. topk_softmax is the softmax over the chosen logits
    with or without renormalize.

    Args:
        logits_TE: `[num_tokens, num_experts]` FP32 (or FP64).
        ids_TK: `[num_tokens, top_k]`; an id outside 0..num_experts-1 means no expert: weight 0, no share in the sum.
        score: one of `SCORES`.
        renormalize: whether the weights of a token sum to `scale`.
        scale: factor on the result (`routed_scaling_factor`).

    Returns:
        `[num_tokens, top_k]` in the dtype of the logits, each within 1e-6 of the exact value for the given logits. A
        weight is NaN where a logit in its own formula is NaN or +inf (any logit of the row for softmax without
        renormalize, any chosen one of the row with renormalize).
    """
    num_experts = logits_TE.shape[-1]
    is_expert_TK = (ids_TK >= 0) & (ids_TK < num_experts)
    chosen_TK = logits_TE.gather(-1, ids_TK.long().clamp(0, num_experts - 1)).double()
    log_TK = torch.where(is_expert_TK, log_scores(chosen_TK, score), -torch.inf)
    if renormalize or score == "topk_softmax":
        weights_TK = _exp_normalized(log_TK, log_TK)
    elif score == "softmax":
        weights_TK = _exp_normalized(log_TK, logits_TE.double())
    else:
        weights_TK = torch.exp(log_TK)
    return (weights_TK * scale).to(logits_TE.dtype)


def expert_counts(ids_TK: Tensor, num_experts: int) -> Tensor:
    """Count how often each expert was chosen, int64 `[num_experts]`; an id outside the range is no expert."""
    ids = ids_TK.flatten().long()
    is_expert = (ids >= 0) & (ids < num_experts)
    counts = torch.zeros(num_experts, dtype=torch.int64, device=ids.device)
    return counts.scatter_add(0, ids.clamp(0, num_experts - 1), is_expert.long())


def load_balancing_loss(logits_TE: Tensor, counts_E: Tensor, *, score: str) -> Tensor:
    """Return E * sum_e f_e * P_e, the balance loss of Switch Transformer (Fedus et al. 2021, eq. 4 to 6), after GShard.

    f_e is expert e's share of all choices, P_e the mean of its normalised score over the tokens: the softmax of the
    logits, or for sigmoid and sqrtsoftplus the score divided by the token's sum over all experts (as DeepSeek-V3 does).
    1 when balanced, up to E when one expert takes everything. The gradient flows through P alone. The statistics are
    those of the given tokens: ranks don't exchange them.

    Args:
        logits_TE: `[num_tokens, num_experts]` FP32.
        counts_E: int64 `[num_experts]`, the choices per expert (`expert_counts`).
        score: one of `SCORES`.

    Returns:
        A scalar in the dtype of the logits; 0 without tokens.
    """
    num_tokens, num_experts = logits_TE.shape
    log_TE = log_scores(logits_TE, score)
    mean_score_E = _exp_normalized(log_TE, log_TE).sum(0) / max(num_tokens, 1)
    share_E = counts_E.to(logits_TE.dtype) / counts_E.sum().clamp_min(1)
    return num_experts * (share_E * mean_score_E).sum()


def _exp_normalized(log_TK: Tensor, log_all_TN: Tensor) -> Tensor:
    """Return exp(log) / sum(exp(log_all)) along the last dimension; 0 where every log_all of a row is -inf."""
    # The largest term becomes 1, so the floor acts on a row of -inf only. The shift cancels: it needs no gradient.
    shift_T1 = log_all_TN.detach().amax(-1, keepdim=True).clamp_min(torch.finfo(log_all_TN.dtype).min)
    total_T1 = torch.exp(log_all_TN - shift_T1).sum(-1, keepdim=True)
    return torch.exp(log_TK - shift_T1) / total_T1.clamp_min(torch.finfo(log_all_TN.dtype).tiny)


def _split_far(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return where softplus is exp, and the logits with those places replaced, so that no gradient is inf * 0 there."""
    far = logits < _SOFTPLUS_IS_EXP
    return far, torch.where(far, _SOFTPLUS_IS_EXP, logits)


def _unknown_score(score: str) -> ValueError:
    return ValueError(f"score: must be one of {', '.join(SCORES)}, got {score!r}")
