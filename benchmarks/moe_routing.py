"""How the tokens of the mega-kernel's benchmarks choose their experts: evenly, or by one of three kinds of skew."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["SKEWS", "draw_ids", "imbalance"]

SKEWS = {
    "none": "every expert equally likely",
    "zipf": "the expert at place n of a fixed random order is 1 / n as likely as the first",
    "hot_expert": "every token chooses expert 0, and the others evenly",
    "hot_rank": "the experts of the first rank together are three times as likely as all others",
}


def _log_odds(skew: str, num_experts: int, experts_per_rank: int) -> Tensor:
    odds = torch.ones(num_experts)
    if skew == "zipf":
        order = torch.randperm(num_experts, generator=torch.Generator().manual_seed(0))
        odds[order] = 1 / torch.arange(1, num_experts + 1)
    elif skew == "hot_expert":
        odds[0] = torch.inf
    elif skew == "hot_rank" and experts_per_rank < num_experts:
        odds[:experts_per_rank] *= 3 * (num_experts - experts_per_rank) / experts_per_rank
    return odds.log()


def draw_ids(
    skew: str, num_tokens: int, num_experts: int, top_k: int, experts_per_rank: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Draw the distinct experts of every token, the likelier the higher their odds (Gumbel-top-k).

    Args:
        skew: a key of `SKEWS`.
        num_tokens, num_experts, top_k, experts_per_rank: sizes.
        generator: its device is that of the results.

    Returns:
        ids `[num_tokens, top_k]` int64, and FP32 weights that sum to 1.

    Raises:
        ValueError: a skew that is not among `SKEWS`.
    """
    if skew not in SKEWS:
        raise ValueError(f"skew: must be one of {', '.join(SKEWS)}, got {skew!r}")
    scores = torch.rand(num_tokens, num_experts, device=generator.device, generator=generator)
    keys = scores
    if skew != "none":
        noise = -(-scores.clamp(min=1e-20).log()).clamp(min=1e-20).log()
        keys = noise + _log_odds(skew, num_experts, experts_per_rank).to(scores.device)
    ids = keys.topk(top_k, dim=-1).indices
    weights = scores.gather(1, ids).clamp(min=1e-6)
    return ids, weights / weights.sum(-1, keepdim=True)


def imbalance(counts: list[list[int]], experts_per_rank: int) -> tuple[float, float]:
    """Return how many rows the fullest rank and the fullest expert have, in means of all ranks and all experts.

    Args:
        counts: `[source rank][expert]` choices.
        experts_per_rank: of the layer.
    """
    experts = [sum(column) for column in zip(*counts, strict=True)]
    ranks = [sum(experts[i : i + experts_per_rank]) for i in range(0, len(experts), experts_per_rank)]
    total = sum(experts)
    if total == 0:
        return 1.0, 1.0
    return max(ranks) * len(ranks) / total, max(experts) * len(experts) / total
