"""The MoE layer without fusion: NCCL's all-to-all around the grouped GEMMs of the kernel tier.

quantise | sort choices by expert | gather rows | all-to-all | sort by local expert | GEMM 1 | activate, quantise |
GEMM 2 | unsort | all-to-all back | weighted sum

A row of the first all-to-all is E4M3 with its scale behind it, so one exchange brings both. Sizes of an all-to-all are
arguments of the host: `counts="host_sync"` exchanges the counts and waits for them, as every layer must that does not
know its routing; `counts="known"` is given them beforehand and waits for nothing, which no layer can do, but which
tells what the wait costs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from unfused_kernels import activate_quantise, weighted_sum

from megamoe.kernels import formats, gemm
from megamoe.kernels.packing import PackedWeight
from megamoe.kernels.quantize import quantize_e4m3
from megamoe.testing.numeric import diff

__all__ = ["COUNTS", "CHAIN_DIFF", "Splits", "UnfusedLayer", "chain"]

COUNTS = ("host_sync", "known")
# Largest `diff` to the mega-kernel. Linear 1 is rounded to BF16 here and not there, so gate, up and h differ by 2^-9 or
# so, and an E4M3 rounding of h falls the other way in one column of thirty, by a step of up to 1/8: about 1e-4.
CHAIN_DIFF = 3e-4
_TAIL = 16  # bytes behind a row: the scale, and what keeps rows aligned


@dataclass(frozen=True)
class Splits:
    """Rows to and from every rank."""

    send: list[int]
    receive: list[int]


class UnfusedLayer:
    """One rank's part; every call is collective.

    Args:
        w13, w2: this rank's experts, packed for the grouped GEMM, `[E, 2I, H]` (gate rows first) and `[E, H, I]`; I a
            multiple of 128.
        limit: of silu's clamps, or None.
        group: the ranks.
    """

    def __init__(self, w13: PackedWeight, w2: PackedWeight, limit: float | None, group: dist.ProcessGroup) -> None:
        self.w13, self.w2, self.limit, self.group = w13, w2, limit, group
        self.num_local, self.world_size = w13.num_experts, group.size()

    def splits(self, ids: Tensor) -> Splits:
        """Return the rows to exchange; waits for the device."""
        counts = self._counts(self._sorted(ids)[0])
        return self._to_host(counts, self._exchange_counts(counts))

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor, splits: Splits | None = None) -> Tensor:
        """Run the layer.

        Args:
            x: BF16 `[tokens, H]`.
            ids: int64 `[tokens, top_k]`; every one an expert.
            weights: FP32 `[tokens, top_k]`.
            splits: of these ids; None = exchange them and wait.

        Returns:
            BF16 `[tokens, H]`.
        """
        num_tokens, hidden = x.shape
        sorted_ids, order = self._sorted(ids)
        counts = self._counts(sorted_ids)
        received = self._exchange_counts(counts)
        if splits is None:
            splits = self._to_host(counts, received)
        rows = torch.empty(num_tokens, hidden + _TAIL, dtype=torch.uint8, device=x.device)
        scale_column = rows.view(torch.float32)[:, hidden // 4]
        quantize_e4m3(x, "token", out=rows[:, :hidden].view(torch.float8_e4m3fn), out_scale=scale_column)
        outgoing = rows.view(torch.int64)[order // ids.shape[1]]
        incoming = outgoing.new_empty(sum(splits.receive), outgoing.shape[1])
        dist.all_to_all_single(incoming, outgoing, splits.receive, splits.send, group=self.group)
        experts = torch.arange(self.num_local, device=x.device, dtype=torch.int16).repeat(self.world_size)
        groups = torch.repeat_interleave(experts, received, output_size=incoming.shape[0])
        groups, by_expert = groups.sort(stable=True)
        slots = self._experts(incoming[by_expert], groups.int(), hidden)
        back = slots[_inverse(by_expert)]
        returned = back.new_empty(outgoing.shape[0], hidden)
        dist.all_to_all_single(returned, back, splits.send, splits.receive, group=self.group)
        return weighted_sum(returned, _inverse(order).view(ids.shape), weights)

    def exchange(self, hidden: int, splits: Splits, device: torch.device) -> Callable[[], None]:
        """Return a call of the two all-to-alls alone, over rows of these sizes."""
        outgoing = torch.zeros(sum(splits.send), (hidden + _TAIL) // 8, dtype=torch.int64, device=device)
        incoming = outgoing.new_empty(sum(splits.receive), outgoing.shape[1])
        back = torch.zeros(sum(splits.receive), hidden, dtype=torch.bfloat16, device=device)
        returned = back.new_empty(sum(splits.send), hidden)

        def call() -> None:
            dist.all_to_all_single(incoming, outgoing, splits.receive, splits.send, group=self.group)
            dist.all_to_all_single(returned, back, splits.send, splits.receive, group=self.group)

        return call

    def _experts(self, rows: Tensor, groups: Tensor, hidden: int) -> Tensor:
        """Return what the experts make of their rows, `[rows, hidden]` BF16."""
        device = rows.device
        values = rows.view(torch.float8_e4m3fn)[:, :hidden]
        scales = rows.view(torch.float32)[:, hidden // 4]
        sums = torch.empty(rows.shape[0], self.w13.rows, dtype=torch.bfloat16, device=device)
        gemm.m_grouped_fp8_fp4_gemm_nt_contiguous((values, scales), self.w13, sums, groups)
        out = torch.empty(rows.shape[0], hidden, dtype=torch.bfloat16, device=device)
        gemm.m_grouped_fp8_fp4_gemm_nt_contiguous(activate_quantise(sums, self.limit), self.w2, out, groups)
        return out

    def _sorted(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        ordered, order = ids.flatten().to(torch.int16).sort(stable=True)  # two passes of radix sort instead of eight
        return ordered, order

    def _counts(self, sorted_ids: Tensor) -> Tensor:
        edges = torch.arange(self.num_local * self.world_size + 1, dtype=torch.int16, device=sorted_ids.device)
        return torch.searchsorted(sorted_ids, edges).diff()

    def _exchange_counts(self, counts: Tensor) -> Tensor:
        """Return the rows of every (source, local expert)."""
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts, group=self.group)
        return received

    def _to_host(self, counts: Tensor, received: Tensor) -> Splits:
        both = torch.stack([counts, received]).view(2, self.world_size, self.num_local).sum(-1)
        return Splits(*both.tolist())


def _inverse(permutation: Tensor) -> Tensor:
    places = torch.empty_like(permutation)
    places[permutation] = torch.arange(permutation.numel(), device=permutation.device)
    return places


def chain(x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor, limit: float | None) -> Tensor:
    """Return what the layer must return, with its rounding points, in float64 between them.

    Args:
        x, ids, weights: as the layer takes them.
        w13, w2: all experts, dequantised, `[E, 2I, H]` and `[E, H, I]`.
        limit: of the clamps, or None.

    Returns:
        BF16 `[tokens, H]`.
    """
    rows = formats.dequantize_e4m3(*formats.quantize_e4m3(x, "token"), "token").double()
    slots = torch.zeros(*ids.shape, x.shape[1], dtype=torch.float64, device=x.device)
    for expert in ids.unique().tolist():
        token, k = (ids == expert).nonzero(as_tuple=True)
        gate, up = (rows[token] @ w13[expert].double().T).bfloat16().double().tensor_split(2, dim=-1)
        if limit is not None:
            gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
        h = (gate * torch.sigmoid(gate) * up).float()
        h = formats.dequantize_e4m3(*formats.quantize_e4m3(h, "block128"), "block128").double()
        slots[token, k] = (h @ w2[expert].double().T).bfloat16().double()
    return (weights.double().unsqueeze(-1) * slots).sum(1).to(torch.bfloat16)


def differs(y: Tensor, fused: Tensor) -> str:
    """Return what is wrong between this layer's output and the mega-kernel's, "" for nothing."""
    found = diff(y, fused)
    return "" if found <= CHAIN_DIFF else f"diff {found:.2e} to the mega-kernel's output, at most {CHAIN_DIFF:.0e}"
