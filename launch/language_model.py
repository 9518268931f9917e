"""The byte-level language model of job `train`: the smallest thing around MoE layers that learns from text.

Shape suffixes: B sequences, S bytes per sequence, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["ByteLanguageModel", "CausalMix"]

_NUM_BYTES = 256


class CausalMix(nn.Module):
    """Mix each position with the few before it, channel by channel (a causal depthwise convolution).

    Args:
        hidden: channels.
        width: positions that one output sees, its own included.
    """

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.width = width
        self.weight = nn.Parameter(torch.randn(hidden, 1, width) * width**-0.5)

    def forward(self, x_BSH: Tensor) -> Tensor:
        """Return `[B, S, H]`; position s depends on positions s - width + 1 .. s."""
        x_BHS = F.pad(x_BSH.transpose(1, 2), (self.width - 1, 0))
        return F.conv1d(x_BHS, self.weight, groups=x_BHS.shape[1]).transpose(1, 2)


class ByteLanguageModel(nn.Module):
    """Embedding, then per layer a causal mix and a MoE layer, each on a residual; norm; head.

    An attention layer takes the place of the mix where one is given. Everything but the MoE and attention layers is
    FP32, and everything but the MoE layers is replicated on every rank.

    Args:
        hidden: width of the residual stream.
        make_layer: builds one MoE layer, `[..., H] -> [..., H]`.
        num_layers: MoE layers.
        moe_dtype: dtype that the MoE layers take.
        width: bytes that one causal mix looks back over.
        make_mix: builds what stands for a mix, `[B, S, H] -> [B, S, H]`; None = `CausalMix`.
    """

    def __init__(
        self,
        hidden: int,
        make_layer: Callable[[], nn.Module],
        num_layers: int,
        *,
        moe_dtype: torch.dtype,
        width: int = 8,
        make_mix: Callable[[], nn.Module] | None = None,
    ) -> None:
        super().__init__()
        self.moe_dtype = moe_dtype
        self.embedding = nn.Embedding(_NUM_BYTES, hidden)
        make_mix = make_mix or (lambda: CausalMix(hidden, width))
        self.mixes = nn.ModuleList(make_mix() for _ in range(num_layers))
        self.moes = nn.ModuleList(make_layer() for _ in range(num_layers))
        self.norms = nn.ModuleList(nn.RMSNorm(hidden) for _ in range(2 * num_layers + 1))
        self.head = nn.Linear(hidden, _NUM_BYTES, bias=False)
        nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, bytes_BS: Tensor) -> Tensor:
        """Return the logits of the next byte, `[B, S, 256]` FP32, for byte values `[B, S]` int64."""
        x_BSH = self.embedding(bytes_BS)
        for index, (mix, moe) in enumerate(zip(self.mixes, self.moes, strict=True)):
            x_BSH = x_BSH + mix(self.norms[2 * index](x_BSH))
            normed = self.norms[2 * index + 1](x_BSH).to(self.moe_dtype)
            # A hash router looks up the byte values; the others ignore them.
            x_BSH = x_BSH + moe(normed, input_ids=bytes_BS).float()
        logits: Tensor = self.head(self.norms[-1](x_BSH))
        return logits
