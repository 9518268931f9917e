"""A fault on request: one weight times 8. It proves that the check of job `infer` can fail and finds the culprit.

`megamoe launch CONFIG --inject-fault RANK` applies it on one rank after the oracle has taken its copy of the weights.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megamoe.errors import MegaMoeError
from megamoe.layers.experts import Experts

__all__ = ["column_reach", "scale_one_weight"]

_FACTOR = 8.0
# E2M1 codes without the sign: 0.5 times 8 is 4
_E2M1_HALF, _E2M1_FOUR, _E2M1_MAGNITUDE = 1, 6, 7


def column_reach(experts: Experts, expert: int, x: Tensor, weights: Tensor) -> Tensor:
    """Return how strongly each column of an expert's w2 is driven, `[I]`: max over tokens of weight * |gate * up|.

    It ranks the columns only, so limits of the activation are left out.

    Args:
        experts: the experts of this rank.
        expert: global id of one of them.
        x: `[T, H]`, tokens that go to it.
        weights: `[T]`, their routing weights.
    """
    index = expert - experts.first_expert
    w13, _ = experts.weights(index, index + 1).dequantize(torch.float32)
    gate, up = (x.float() @ w13[0].cpu().float().T).chunk(2, dim=-1)
    return (weights[:, None] * gate.sigmoid() * gate * up).abs().amax(0)


def scale_one_weight(experts: Experts, expert: int, reach: Tensor) -> str:
    """Multiply one element of an expert's w2 by 8, exactly, through the layer's own way to refresh weights.

    Of the elements whose eightfold the format can hold, it takes the one that the output feels most: chance would
    mostly find one that no output shows beside the rounding.

    Args:
        experts: the experts of this rank.
        expert: global id of one of them.
        reach: `[I]`, of `column_reach`.

    Returns:
        what was done, for the log.

    Raises:
        MegaMoeError: there is no such element.
    """
    index = expert - experts.first_expert
    form = experts.spec.weight_format
    one = experts.weights(index, index + 1)
    stored = one.w2[0].detach()
    _, values = one.dequantize(torch.float32)
    effect = values[0].cpu().float().abs() * reach.cpu()
    changed = stored.cpu().clone()
    if form == "mxfp4":
        magnitudes = torch.stack((changed & 0xF, changed >> 4), dim=-1).flatten(-2) & _E2M1_MAGNITUDE
        effect = effect * (magnitudes == _E2M1_HALF)
    else:
        effect = effect * (changed.float().abs() * _FACTOR <= torch.finfo(stored.dtype).max)
    row, column = divmod(int(effect.argmax()), effect.shape[1])
    if float(effect[row, column]) == 0:
        raise MegaMoeError(f"--inject-fault: expert {expert} has no weight in w2 whose eightfold {form} can hold")
    if form == "mxfp4":
        # low nibble = even column; XOR turns code 1 into code 6 and leaves the sign
        changed[row, column // 2] ^= (_E2M1_HALF ^ _E2M1_FOUR) << (4 * (column % 2))
    else:
        changed[row, column] = (changed[row, column].float() * _FACTOR).to(changed.dtype)
    scale = {} if one.w2_scale is None else {"w2_scale": one.w2_scale[0].detach().clone()}
    experts.load_expert(expert, w2=changed.to(stored.device), **scale)
    return f"expert {expert}: w2[{row}, {column}] times 8"
