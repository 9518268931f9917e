"""The MXFP4 experts of a rank, packed for the mega-kernel: gate and up interleaved, both linears in whole blocks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megamoe.kernels.packing.packed import PackedWeight, Progress, pack_mxfp4_experts
from megamoe.kernels.packing.tiles import tile_layout

__all__ = ["MOE_LAYOUT", "PackedMoeExperts", "gate_up_order", "pack_moe_experts", "packed_moe_bytes"]

MOE_LAYOUT = "sm90_moe"
_BLOCK_ROWS = 128
_NEUTRAL_SCALE = 127  # 2^0, of the padding


def gate_up_order(intermediate: int) -> Tensor:
    """Return which row of the canonical w13 each packed row is, int64; -1 for padding.

    A block of 128 packed rows is gate and up of 64 columns, in turn: row 2q + b of block B is gate (b = 0) or up
    (b = 1) of column 64B + 16 (q % 16 / 4) + 4 (q / 16) + q % 4, so that a thread that holds sums of one token holds
    gate and up of 16 neighbouring columns. Two blocks make the 128 columns that share a scale of h, so there is an
    even number of them.
    """
    blocks = 2 * -(-intermediate // 128)
    q = torch.arange(64)
    column = 16 * (q % 16 // 4) + 4 * (q // 16) + q % 4
    columns = (64 * torch.arange(blocks).unsqueeze(1) + column).flatten()
    gate = torch.where(columns < intermediate, columns, -1)
    up = torch.where(columns < intermediate, columns + intermediate, -1)
    return torch.stack((gate, up), dim=-1).flatten()


@dataclass
class PackedMoeExperts:
    """The experts of one rank as the mega-kernel reads them; rows beyond the layer's are zero.

    Attributes:
        w13: `[E, 2 I rounded up to 256, H]`, rows in `gate_up_order`.
        w2: `[E, H rounded up to 128, I]`.
        b13, b2: FP32 biases in the order and number of the rows, or None.
        hidden, intermediate: H and I.
    """

    w13: PackedWeight
    w2: PackedWeight
    b13: Tensor | None
    b2: Tensor | None
    hidden: int
    intermediate: int

    @property
    def num_experts(self) -> int:
        """Experts of this rank, E."""
        return self.w13.num_experts

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors together."""
        biases = sum(bias.nbytes for bias in (self.b13, self.b2) if bias is not None)
        return self.w13.nbytes + self.w2.nbytes + biases

    def load_expert(
        self,
        expert: int,
        w13: Tensor,
        w13_scale: Tensor,
        w2: Tensor,
        w2_scale: Tensor,
        b13: Tensor | None = None,
        b2: Tensor | None = None,
    ) -> None:
        """Replace one expert by canonical tensors (those of one expert); addresses stay.

        Raises:
            TypeError: a wrong dtype.
            ValueError: a wrong shape, or biases where the layer has none.
        """
        if (b13 is None) != (self.b13 is None) or (b2 is None) != (self.b2 is None):
            raise ValueError("load_expert: biases must be given where the layer has them, and only there")
        order = gate_up_order(self.intermediate).to(self.w13.data.device)
        self.w13.load_expert(expert, *_gate_up_rows(w13, w13_scale, order))
        self.w2.load_expert(expert, *_whole_blocks(w2, w2_scale))
        if b13 is not None and self.b13 is not None:
            self.b13[expert] = _take(b13.float(), order, 0.0)
        if b2 is not None and self.b2 is not None:
            self.b2[expert, : self.hidden] = b2.float()

    def unpack(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the canonical (w13 codes, w13 scales, w2 codes, w2 scales) of all experts, byte for byte."""
        order = gate_up_order(self.intermediate).to(self.w13.data.device)
        rows = torch.empty(2 * self.intermediate, dtype=torch.int64, device=order.device)
        places = (order >= 0).nonzero().squeeze(1)
        rows[order[places]] = places
        codes, scales = self.w13.unpack()
        codes2, scales2 = self.w2.unpack()
        return codes[:, rows], scales[:, rows], codes2[:, : self.hidden], scales2[:, : self.hidden]


def pack_moe_experts(
    w13: Tensor,
    w13_scale: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    b13: Tensor | None = None,
    b2: Tensor | None = None,
    *,
    strict: bool = False,
    progress: Progress | None = None,
) -> PackedMoeExperts:
    """Pack the canonical MXFP4 experts of a rank; on any device, one expert at a time.

    Args:
        w13: uint8 `[E, 2I, H / 2]`, gate rows first.
        w13_scale: uint8 `[E, 2I, H / 32]`, UE8M0.
        w2: uint8 `[E, H, I / 2]`.
        w2_scale: uint8 `[E, H, I / 32]`.
        b13, b2: biases `[E, 2I]` and `[E, H]`, or None.
        strict: refuse rows that the packed form does not hold exactly.
        progress: called after each expert of each linear with (done, in all).

    Raises:
        TypeError: a wrong dtype.
        ValueError: shapes that do not belong together, or a row refused under `strict`.
    """
    num_experts, hidden, intermediate = w13.shape[0], w2.shape[1], w13.shape[1] // 2
    if w13.shape[2] * 2 != hidden or tuple(w2.shape) != (num_experts, hidden, intermediate // 2):
        raise ValueError(
            f"w13, w2: expected [E, 2I, H / 2] and [E, H, I / 2], got {list(w13.shape)} and {list(w2.shape)}"
        )
    order = gate_up_order(intermediate).to(w13.device)
    rows2 = -(-hidden // _BLOCK_ROWS) * _BLOCK_ROWS

    def part(first: int) -> Progress | None:
        return None if progress is None else lambda done, _: progress(first + done, 2 * num_experts)

    def experts13() -> Iterator[tuple[Tensor, Tensor]]:
        for expert in range(num_experts):
            yield _gate_up_rows(w13[expert], w13_scale[expert], order)

    def experts2() -> Iterator[tuple[Tensor, Tensor]]:
        for expert in range(num_experts):
            yield _whole_blocks(w2[expert], w2_scale[expert])

    packed13 = pack_mxfp4_experts(
        experts13(),
        MOE_LAYOUT,
        num_experts=num_experts,
        rows=order.numel(),
        columns=hidden,
        device=w13.device,
        strict=strict,
        progress=part(0),
    )
    packed2 = pack_mxfp4_experts(
        experts2(),
        MOE_LAYOUT,
        num_experts=num_experts,
        rows=rows2,
        columns=intermediate,
        device=w13.device,
        strict=strict,
        progress=part(num_experts),
    )
    return PackedMoeExperts(
        w13=packed13,
        w2=packed2,
        b13=None if b13 is None else torch.stack([_take(bias.float(), order, 0.0) for bias in b13]),
        b2=None if b2 is None else F.pad(b2.float(), (0, rows2 - hidden)),
        hidden=hidden,
        intermediate=intermediate,
    )


def packed_moe_bytes(hidden: int, intermediate: int) -> int:
    """Return the bytes of one packed expert without biases: codes, relative exponents, a scale for each row."""
    tiles = tile_layout(MOE_LAYOUT)
    rows13 = gate_up_order(intermediate).numel()
    rows2 = -(-hidden // _BLOCK_ROWS) * _BLOCK_ROWS
    return tiles.nbytes(rows13, hidden) + tiles.nbytes(rows2, intermediate) + 4 * (rows13 + rows2)


def _take(x: Tensor, order: Tensor, padding: float) -> Tensor:
    """Return `x[order]`, with `padding` where order is -1."""
    taken = x[order.clamp(min=0)]
    mask = (order < 0).view(-1, *[1] * (x.dim() - 1))
    return taken.masked_fill(mask, padding)


def _gate_up_rows(codes: Tensor, scales: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
    return _take(codes, order, 0), _take(scales, order, _NEUTRAL_SCALE)


def _whole_blocks(codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    missing = -codes.shape[0] % _BLOCK_ROWS
    return F.pad(codes, (0, 0, 0, missing)), F.pad(scales, (0, 0, 0, missing), value=_NEUTRAL_SCALE)
