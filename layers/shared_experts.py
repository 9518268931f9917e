"""The shared experts of a MoE layer: one dense gated MLP that every token passes through, replicated on every rank."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megamoe.kernels.activation import activate
from megamoe.kernels.eager import is_eager
from megamoe.kernels.gated import gated_rows, takes_rows

__all__ = ["SharedExperts"]


class SharedExperts(nn.Module):
    """y = W2 activation(W1 x, W3 x), times sigmoid(gate . x) where there is a gate.

    Several shared experts are one: their intermediate columns are concatenated.

    Parameters:
        w13: `[2 * intermediate, hidden]`, gate rows first.
        w2: `[hidden, intermediate]`.
        gate: `[1, hidden]`, with `gated`.

    Args:
        hidden: H.
        intermediate: width of all shared experts together.
        activation, limit, alpha: those of the routed experts.
        gated: multiply by a sigmoid of x.
        dtype: of the parameters.
        device: where they live.
    """

    w13: nn.Parameter
    w2: nn.Parameter
    gate: nn.Parameter | None

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        *,
        activation: str,
        limit: float | None,
        alpha: float | None,
        gated: bool,
        dtype: torch.dtype,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.hidden, self.intermediate = hidden, intermediate
        self.activation, self.limit, self.alpha = activation, limit, alpha
        # ordinary tensors even under inference_mode, as of every other part of the layer
        with torch.inference_mode(False):
            self.w13 = nn.Parameter(torch.empty(2 * intermediate, hidden, dtype=dtype, device=device))
            self.w2 = nn.Parameter(torch.empty(hidden, intermediate, dtype=dtype, device=device))
            self.gate = nn.Parameter(torch.empty(1, hidden, dtype=dtype, device=device)) if gated else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the parameters from N(0, 1 / fan_in)."""
        nn.init.normal_(self.w13, std=self.hidden**-0.5)
        nn.init.normal_(self.w2, std=self.intermediate**-0.5)
        if self.gate is not None:
            nn.init.normal_(self.gate, std=self.hidden**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[num_tokens, hidden]` to the same shape and dtype."""
        rows = x.to(self.w13.dtype)
        gate_and_up = F.linear(rows, self.w13)
        activation, limit, alpha = self.activation, self.limit, self.alpha
        if is_eager(gate_and_up) and takes_rows(gate_and_up):
            h = gated_rows(gate_and_up, activation=activation, limit=limit, alpha=alpha)
        else:
            gate, up = gate_and_up.chunk(2, dim=-1)
            h = activate(gate, up, activation=activation, limit=limit, alpha=alpha)
        y = F.linear(h.to(self.w2.dtype), self.w2)
        if self.gate is not None:
            # FP32: a BF16 sigmoid near 1 has steps of 0.4 %
            y = torch.sigmoid(F.linear(rows, self.gate).float()) * y
        return y.to(x.dtype)

    def extra_repr(self) -> str:
        gated = ", gated" if self.gate is not None else ""
        return f"hidden={self.hidden}, intermediate={self.intermediate}, activation={self.activation}{gated}"
