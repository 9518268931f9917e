"""The check of job `infer` for attention layers: every token of a rank against the float64 oracle.

Two things are checked apart, because a key whose score is a rounding away from another's may be kept in its place: that
no kept key scores worse than one left out, beyond what roundings do; and that the output is that of the kept keys.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megamoe.config import MoEConfig
from megamoe.layers.compressed_attention import CompressedAttention
from megamoe.layers.compressor import RATIO
from megamoe.layers.indexer_attention import IndexerAttention, attention_sections
from megamoe.testing.attention_oracle import attention_oracle, compressed_attention_oracle
from megamoe.testing.numeric import row_diff

__all__ = ["AttentionCheck", "check_attention", "describe_attention_bounds"]

# BF16: six roundings between x and the output (latents, queries, absorbed queries, softmax weights, values, output)
# are 0.28 %, and `row_diff` is half the square of that, 4e-6; logits of several units turn their own roundings into 1 %
# of a softmax weight (largest row seen: 1.7e-4).
_ROWS = {"bfloat16": 1e-3, "float32": 1e-9}
# By how much a kept key may score worse than one left out, in sizes of the query's scores (`index_size_oracle`, in root
# mean square over its keys; the scores themselves may be small because heads cancel, and roundings do not cancel with
# them). A rounding by e of both factors moves a score by at most about 1.4 e of its size, and the worst of hundreds of
# pairs by six times that: e = 2^-9 for BF16 (more than once on the way), 2^-4 / sqrt(3) for E4M3, 0.12 for E2M1 with a
# scale that is up to twice too large. The largest seen is 0.57 with MXFP4, whatever the scores.
_CHOICE = {"float32": 6e-5, "bfloat16": 0.03, "fp8": 0.3, "mxfp4": 1.0}


@dataclass(frozen=True)
class AttentionCheck:
    """What the check of one attention layer says about this rank's tokens.

    Attributes:
        worst_row: largest row error against the oracle.
        worst_choice: largest gap between a key left out and a kept one, in sizes of the query's scores.
        failure: what is wrong, None when all is well.
    """

    worst_row: float
    worst_choice: float
    failure: str | None


def _bounds(config: MoEConfig) -> tuple[float, float]:
    _, indexer = attention_sections(config)
    dtype = config.model.dtype
    return _ROWS[dtype], _CHOICE[dtype if indexer.quantization == "none" else indexer.quantization]


def describe_attention_bounds(config: MoEConfig) -> str:
    """Return the bounds of the check in words."""
    rows, choice = _bounds(config)
    return f"rows <= {rows:.0e}, choice <= {choice:g} sizes"


def check_attention(
    config: MoEConfig, layer: IndexerAttention | CompressedAttention, x: Tensor, y: Tensor, indices: Tensor
) -> AttentionCheck:
    """Check one call of one layer on one sequence.

    Args:
        config: of the layer.
        layer: its parameters are read.
        x, y: `[S, H]`, what it was given and what it returned.
        indices: `[S, K]`, the keys that it kept.
    """
    if not len(x):
        return AttentionCheck(0.0, 0.0, None)
    sections = tuple(dataclasses.asdict(section) for section in attention_sections(config))
    parameters = {name: value.detach().cpu().double() for name, value in layer.named_parameters()}
    kept = [[i for i in row if i >= 0] for row in indices.tolist()]
    compressed = isinstance(layer, CompressedAttention)
    oracle = compressed_attention_oracle if compressed else attention_oracle
    keys = [(s + 1) // RATIO if compressed else s + 1 for s in range(len(x))]
    wrong = [
        s
        for s, row in enumerate(kept)
        if len({*row}) != min(keys[s], indices.shape[1]) or len(row) != len({*row}) or max(row, default=-1) >= keys[s]
    ]
    if wrong:
        return AttentionCheck(
            math.inf, math.inf, f"token {wrong[0]} keeps {sorted(kept[wrong[0]])} of {keys[wrong[0]]}"
        )
    truth = oracle(x.cpu().double(), parameters, *sections, kept=kept)
    rows = row_diff(y.cpu(), truth.out).nan_to_num(nan=math.inf)

    gaps = torch.zeros(len(x), dtype=torch.float64)
    for s, row in enumerate(kept):
        scores = truth.scores[s, : keys[s]]
        left = torch.ones(keys[s], dtype=torch.bool)
        left[row] = False
        if left.any():
            size = truth.score_sizes[s, : keys[s]].square().mean().sqrt()
            gaps[s] = (scores[left].max() - scores[row].min()) / (size + 1e-30)
    row_bound, choice_bound = _bounds(config)
    failure = None
    if rows.max() > row_bound:
        failure = f"row error {float(rows.max()):.1e} of token {int(rows.argmax())} (bound {row_bound:.0e})"
    elif gaps.max() > choice_bound:
        failure = (
            f"token {int(gaps.argmax())} keeps a key that scores {float(gaps.max()):.2g} sizes worse than one left out "
            f"(bound {choice_bound:g})"
        )
    return AttentionCheck(float(rows.max()), float(gaps.max()), failure)
