"""Backend `reference`: plain PyTorch on any device, an all-to-all before and after the local experts, differentiable.

One call: each rank tells each peer how many rows every expert of that peer gets, then sends the rows (quantised as the
kernels send them) with their routing weights; the owner runs its experts and sends the slots back; the source sums each
token's slots in k order. Within an expert rows keep the order (source rank, token, k), so that the order does not
depend on how many ranks hold the tokens. There is no token bound: `overflow="chunk"` needs no chunks.

Bits: the sum over k has a fixed order, and the same call gives the same bits on the same machine. torch's matmul picks
its algorithm by the number of rows, so a token's last bits may change with the size of the batch around it.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megamoe.backends.base import Backend, BackendSetup, Gradients
from megamoe.comm.collectives import Collectives, pack_rows, unpack_rows
from megamoe.config import MoESpec
from megamoe.errors import MegaMoeError
from megamoe.kernels.reference import (
    dequantize_rows,
    local_backward,
    local_forward,
    quantize_rows,
    sum_slots,
)
from megamoe.kernels.weights import ExpertWeights

__all__ = ["BACKEND", "ReferenceBackend"]

# what precedes the counts in the message to each peer; see `_Route`
_HEADER = ("num_tokens", "num_bad_ids", "bad_id", "problem", "call")


@dataclass(frozen=True)
class _Route:
    """Who sends what to whom in one call.

    Attributes:
        entries: `[M]` int64, flat positions `token * top_k + k` of this rank's rows, sorted by expert.
        send_counts: rows for each rank.
        recv_counts: rows from each rank.
        grouping: `[N]` int64, the received rows in the order of the local experts.
        expert_counts: rows of each local expert.
    """

    entries: Tensor
    send_counts: list[int]
    recv_counts: list[int]
    grouping: Tensor
    expert_counts: list[int]


class ReferenceBackend(Backend):
    """See the module's docstring."""

    name = "reference"
    differentiable = True

    @classmethod
    def unavailable(cls, spec: MoESpec, device: torch.device, world_size: int) -> str | None:
        return None

    def __init__(self, setup: BackendSetup) -> None:
        self.setup = setup
        self.spec = setup.spec
        self.collectives: Collectives = setup.collectives
        self._call = 0

    def forward(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, experts: ExpertWeights) -> Tensor:
        experts.require_canonical("the backend reference")
        route = self._route(x, topk_ids, experts)
        token = route.entries // self.spec.top_k
        columns = [column[token] for column in quantize_rows(x, self.spec)]
        columns.append(topk_weights.reshape(-1)[route.entries])
        *rows, row_weights = self._dispatch(columns, route)
        slots = local_forward(dequantize_rows(rows, self.spec), row_weights, route.expert_counts, experts, self.spec)
        (returned,) = self._combine([slots], route)
        return sum_slots(returned, route.entries, len(x), self.spec.top_k).to(x.dtype)

    def backward(
        self,
        grad: Tensor,
        x: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        experts: ExpertWeights,
        needed: Sequence[bool],
    ) -> Gradients:
        experts.require_canonical("backward")
        # the same exchanges on every rank whatever it needs, so that ranks with other needs or no tokens stay in step
        route = self._route(x, topk_ids, experts)
        token = route.entries // self.spec.top_k
        weights = topk_weights.reshape(-1)[route.entries]
        rows, grad_slots, row_weights = self._dispatch([x[token], grad[token], weights], route, " (backward)")
        local = local_backward(grad_slots.float(), rows.float(), row_weights, route.expert_counts, experts, self.spec)
        grad_rows, grad_weights = self._combine([local.rows, local.row_weights], route, " (backward)")
        grad_topk_weights = torch.zeros_like(topk_weights)
        grad_topk_weights.view(-1)[route.entries] = grad_weights
        grad_x = sum_slots(grad_rows, route.entries, len(x), self.spec.top_k).to(x.dtype)
        return Gradients(grad_x, grad_topk_weights, local.w13, local.w2, local.b13, local.b2)

    # ---- exchanges --------------------------------------------------------------------------------------------------

    def _route(self, x: Tensor, topk_ids: Tensor, experts: ExpertWeights) -> _Route:
        num_experts, world_size = self.spec.num_experts, self.collectives.world_size
        num_local = num_experts // world_size
        ids = topk_ids.reshape(-1).to(torch.int64)
        too_large = ids >= num_experts
        # an id outside the range is no expert: it is dropped here, before anything is indexed by it
        kept = ((ids >= 0) & ~too_large).nonzero().squeeze(1)
        order = torch.argsort(ids[kept], stable=True)
        entries = kept[order]
        counts = torch.bincount(ids[entries], minlength=num_experts)
        num_bad = too_large.sum()
        bad_id = torch.where(num_bad > 0, ids.max() if ids.numel() else num_bad, num_bad)
        mine = torch.cat([num_bad[None], bad_id[None], counts]).cpu()

        # one message per peer: the header, then its experts' counts
        self._call += 1
        head = torch.tensor(
            [x.shape[0], int(mine[0]), int(mine[1]), self._problem(x.dtype, experts.w13.dtype), self._call]
        )
        message = torch.cat([head.expand(world_size, -1), mine[2:].view(world_size, num_local)], dim=1)
        sent = message.to(x.device)
        ones = [1] * world_size
        received = self.collectives.all_to_all(sent, ones, ones, phase="exchange of counts")
        received = self.collectives.to_host(received, phase="exchange of counts")
        self._check_headers([row[: len(_HEADER)] for row in received.tolist()])

        recv_table = received[:, len(_HEADER) :]
        local_expert = torch.arange(num_local).repeat(world_size).repeat_interleave(recv_table.reshape(-1))
        return _Route(
            entries=entries,
            send_counts=mine[2:].view(world_size, num_local).sum(1).tolist(),
            recv_counts=recv_table.sum(1).tolist(),
            grouping=torch.argsort(local_expert, stable=True).to(x.device),
            expert_counts=recv_table.sum(0).tolist(),
        )

    def _problem(self, x_dtype: torch.dtype, param_dtype: torch.dtype) -> int:
        """Return a number that differs where two ranks would not understand each other's rows."""
        return zlib.crc32(f"{self.spec}{x_dtype}{param_dtype}".encode())

    def _check_headers(self, headers: list[list[int]]) -> None:
        """Raise the same error on every rank: all decide from the same headers."""
        table = [dict(zip(_HEADER, header, strict=True)) for header in headers]
        describe = self.collectives.group.describe
        problems = [row["problem"] for row in table]
        if len(set(problems)) > 1:
            other = next(rank for rank, problem in enumerate(problems) if problem != problems[0])
            raise MegaMoeError(
                f"exchange of counts: {describe(0)} and {describe(other)} are not in the same call: sizes, formats or "
                "dtypes of x or the weights differ; every rank must call the same layers in the same order"
            )
        if self.setup.overflow == "error":
            for rank, row in enumerate(table):
                if row["num_tokens"] > self.setup.max_tokens_per_rank:
                    raise MegaMoeError(
                        f"parallel.max_tokens_per_rank: {describe(rank)} brought {row['num_tokens']} tokens, the bound "
                        f"is {self.setup.max_tokens_per_rank}; raise it or set parallel.overflow: chunk"
                    )
        if not self.setup.check:
            return
        calls = [row["call"] for row in table]
        if len(set(calls)) > 1:
            raise MegaMoeError(
                f"exchange of counts: the ranks are in calls number {calls}; every rank must make the same calls"
            )
        for rank, row in enumerate(table):
            if row["num_bad_ids"]:
                raise MegaMoeError(
                    f"topk_ids: {describe(rank)} has {row['num_bad_ids']} ids above the last expert, the largest is "
                    f"{row['bad_id']}; valid are 0 to {self.spec.num_experts - 1}, or -1 for no expert"
                )

    def _dispatch(self, columns: Sequence[Tensor], route: _Route, suffix: str = "") -> list[Tensor]:
        """Send rows to the owners of their experts, and return the received ones grouped by local expert."""
        if self.collectives.world_size == 1:
            # the rows are sorted by expert already
            return list(columns)
        message = self.collectives.all_to_all(
            pack_rows(*columns), route.send_counts, route.recv_counts, phase=f"dispatch{suffix}"
        )
        return unpack_rows(message[route.grouping], columns)

    def _combine(self, columns: Sequence[Tensor], route: _Route, suffix: str = "") -> list[Tensor]:
        """Send rows back to where they came from, in the order of `route.entries`."""
        if self.collectives.world_size == 1:
            return list(columns)
        packed = pack_rows(*columns)
        message = torch.empty_like(packed)
        message[route.grouping] = packed
        returned = self.collectives.all_to_all(message, route.recv_counts, route.send_counts, phase=f"combine{suffix}")
        return unpack_rows(returned, columns)


BACKEND = ReferenceBackend
