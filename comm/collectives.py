"""Bounded exchanges between the ranks of a group: uneven all-to-all, all-gather, sum, and agreement.

torch's own collectives say neither whom they wait for nor, on gloo, which rank was lost. Over gloo every exchange here
is therefore made of point-to-point messages with one deadline, so that an error names the phase and the rank. Over
NCCL the collectives of torch are used; a wait of the host is bounded there too (`Collectives.to_host`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from megamoe.comm.groups import RankGroup
from megamoe.errors import BackendUnavailable, ConfigError, MegaMoeError, MegaMoETimeout

__all__ = ["Collectives", "pack_rows", "unpack_rows"]

# "MoE" in ASCII: keeps our messages apart from a program's own send and recv on the same group, which default to tag 0
_TAG = 0x4D6F45
# gloo and NCCL count message elements in 32 bits in places: larger messages go in pieces of this many bytes
_PIECE_BYTES = 1 << 30
# how an error that another rank reports by name is raised here
_ERRORS: dict[str, type[Exception]] = {
    error.__name__: error for error in (BackendUnavailable, ConfigError, MegaMoETimeout, TypeError, ValueError)
}

T = TypeVar("T")


class Collectives:
    """Exchanges over one group for tensors of one device. Every rank of the group must make the same calls in order.

    Args:
        group: who takes part.
        device: where the exchanged tensors live.
        timeout_s: seconds that one exchange may wait for a peer.
    """

    def __init__(self, group: RankGroup, device: torch.device, timeout_s: float) -> None:
        self.group = group
        self.rank = group.rank
        self.world_size = group.world_size
        self.device = device
        self.timeout_s = timeout_s
        self._point_to_point = False
        self._wire_device = device
        if group.process_group is not None and group.world_size > 1:
            self._point_to_point = _transport(group.process_group, device) == "gloo"
            if self._point_to_point:
                # gloo moves host memory; tensors of another device are staged
                self._wire_device = torch.device("cpu")

    # ---- rows -------------------------------------------------------------------------------------------------------

    def all_to_all(self, rows: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int], *, phase: str) -> Tensor:
        """Send consecutive blocks of rows to the ranks, and return the blocks that they sent here, in rank order.

        Args:
            rows: `[sum(send_counts), ...]`, any dtype; block i goes to rank i.
            send_counts: rows for each rank; zeros are fine.
            recv_counts: rows that each rank sends here; the caller knows them from an exchange of counts.
            phase: what this exchange is for, named in an error.

        Returns:
            `[sum(recv_counts), ...]` of the same dtype, on the same device.

        Raises:
            MegaMoETimeout: a rank did not answer within `timeout_s`.
            MegaMoeError: the connection to a rank was lost.
        """
        if self.world_size == 1:
            return rows
        wire = rows.detach().to(self._wire_device).contiguous()
        out = torch.empty((sum(recv_counts), *rows.shape[1:]), dtype=rows.dtype, device=self._wire_device)
        row_bytes = rows[:1].numel() * rows.element_size() if len(rows) else out[:1].numel() * out.element_size()
        sources = wire.view(torch.uint8).reshape(-1).split([n * row_bytes for n in send_counts])
        targets = out.view(torch.uint8).reshape(-1).split([n * row_bytes for n in recv_counts])
        self._exchange(sources, targets, phase)
        return out.to(self.device)

    def all_gather(self, rows: Tensor, counts: Sequence[int], *, phase: str) -> Tensor:
        """Return every rank's rows in rank order.

        Args:
            rows: `[counts[rank], ...]`, this rank's rows.
            counts: rows of each rank, the same list everywhere.
            phase: what this exchange is for, named in an error.

        Returns:
            `[sum(counts), ...]`.
        """
        if self.world_size == 1:
            return rows
        wire = rows.detach().to(self._wire_device).contiguous()
        out = torch.empty((sum(counts), *rows.shape[1:]), dtype=rows.dtype, device=self._wire_device)
        row_bytes = out[:1].numel() * out.element_size()
        sources = [wire.view(torch.uint8).reshape(-1)] * self.world_size
        targets = out.view(torch.uint8).reshape(-1).split([n * row_bytes for n in counts])
        self._exchange(sources, targets, phase)
        return out.to(self.device)

    def all_reduce(self, values: Tensor, *, phase: str) -> Tensor:
        """Return the sum of a flat tensor over the ranks, added in rank order, so the same bits on every rank and run.

        Args:
            values: `[n]`, a floating dtype, of one size on every rank.
            phase: what this sum is for, named in an error.
        """
        if self.world_size == 1:
            return values
        # each rank sums one chunk, then the chunks are gathered: 2n values travel per rank, whatever the world size
        size = -(-values.numel() // self.world_size)
        counts = [max(0, min(size, values.numel() - rank * size)) for rank in range(self.world_size)]
        mine = counts[self.rank]
        parts = self.all_to_all(values, counts, [mine] * self.world_size, phase=phase).view(self.world_size, mine)
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        return self.all_gather(total, counts, phase=phase)

    def to_host(self, values: Tensor, *, phase: str) -> Tensor:
        """Copy an exchanged tensor to the host. On a GPU the wait for the exchange before it is bounded."""
        if values.device.type != "cuda":
            return values.cpu()
        event = torch.cuda.Event()
        event.record()
        deadline = time.monotonic() + self.timeout_s
        while not event.query():
            if time.monotonic() > deadline:
                raise MegaMoETimeout(
                    f"{phase}: {self.group.describe(self.rank)} waited {self.timeout_s:g} s for the other "
                    f"{self.world_size - 1} ranks of its group"
                )
            time.sleep(0)
        return values.cpu()

    # ---- agreement --------------------------------------------------------------------------------------------------

    def gather_objects(self, value: Any, *, phase: str) -> list[Any]:
        """Return every rank's value, in rank order. Values travel as JSON, so nothing received is ever executed."""
        if self.world_size == 1:
            return [value]
        text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(self.device)
        size = torch.tensor([text.numel()], dtype=torch.int64, device=self.device)
        sizes = self.to_host(self.all_gather(size, [1] * self.world_size, phase=phase), phase=phase).tolist()
        blob = self.to_host(self.all_gather(text, sizes, phase=phase), phase=phase)
        return [json.loads(bytes(part.numpy())) for part in blob.split(sizes)]

    def run_together(self, step: Callable[[], T], *, phase: str) -> T:
        """Run a local step on every rank; when it fails on some, raise on all of them with every failure's message.

        Args:
            step: what may fail here; it must not communicate.
            phase: what the step is for, named in an error.

        Raises:
            MegaMoeError: or one of its subclasses, as the failing rank of lowest number raised.
        """
        value: T | None = None
        failure: Exception | None = None
        try:
            value = step()
        except Exception as error:  # whatever it is, the peers must hear of it
            if self.world_size == 1:
                raise
            failure = error
        own = None if failure is None else [type(failure).__name__, str(failure)]
        reports = self.gather_objects(own, phase=phase)
        failed = {rank: report for rank, report in enumerate(reports) if report is not None}
        if failed:
            messages = {text for _, text in failed.values()}
            if len(failed) == self.world_size and len(messages) == 1:
                message = messages.pop()
            else:
                message = "; ".join(f"{self.group.describe(rank)}: {text}" for rank, (_, text) in failed.items())
            first = next(iter(failed.values()))[0]
            raise _ERRORS.get(first, MegaMoeError)(message) from failure
        return cast(T, value)

    def barrier(self, timeout_s: float | None = None) -> None:
        """Wait on the host until every rank of the group is here.

        Args:
            timeout_s: seconds to wait; None = that of the group.

        Raises:
            MegaMoETimeout: a rank did not come; over gloo the message names it.
        """
        bounded = self if timeout_s is None else Collectives(self.group, self.device, timeout_s)
        bounded.gather_objects(None, phase="barrier")

    # ---- transport --------------------------------------------------------------------------------------------------

    def _exchange(self, sources: Sequence[Tensor], targets: Sequence[Tensor], phase: str) -> None:
        """Move `sources[r]` to rank r and fill `targets[r]` from rank r; both are flat bytes."""
        if self._point_to_point:
            self._exchange_point_to_point(sources, targets, phase)
        else:
            self._exchange_collective(sources, targets, phase)

    def _exchange_point_to_point(self, sources: Sequence[Tensor], targets: Sequence[Tensor], phase: str) -> None:
        group = self.group.process_group
        assert group is not None, "a transport needs a process group"
        targets[self.rank].copy_(sources[self.rank])
        peers = [(self.rank + step) % self.world_size for step in range(1, self.world_size)]
        started = time.monotonic()
        at_fault = self.rank
        try:
            works: list[tuple[int, dist.Work]] = []
            # all receives first, so that no message waits for a place to go
            for start, buffers in ((group.recv, targets), (group.send, sources)):
                for at_fault in peers:
                    pieces = [piece for piece in buffers[at_fault].split(_PIECE_BYTES) if piece.numel()]
                    works += [(at_fault, start([piece], at_fault, _TAG)) for piece in pieces]
            for peer, work in works:
                at_fault = peer
                remaining_s = self.timeout_s - (time.monotonic() - started)
                work.wait(timedelta(milliseconds=max(1, round(remaining_s * 1000))))
        except RuntimeError as error:
            raise self._failure(phase, at_fault, error, time.monotonic() - started) from error

    def _exchange_collective(self, sources: Sequence[Tensor], targets: Sequence[Tensor], phase: str) -> None:
        group = self.group.process_group
        # not the list form: gloo takes equal sizes only there
        out = torch.empty(sum(target.numel() for target in targets), dtype=torch.uint8, device=self._wire_device)
        try:
            dist.all_to_all_single(
                out,
                torch.cat(list(sources)),
                [target.numel() for target in targets],
                [source.numel() for source in sources],
                group=group,
            )
        except RuntimeError as error:
            me = self.group.describe(self.rank)
            raise MegaMoeError(f"{phase}: {me} lost a peer of its group: {error}") from error
        for target, part in zip(targets, out.split([target.numel() for target in targets]), strict=True):
            target.copy_(part)

    def _failure(self, phase: str, peer: int, error: RuntimeError, elapsed: float) -> MegaMoeError:
        me, other = self.group.describe(self.rank), self.group.describe(peer)
        if "timed out" in str(error).lower():
            return MegaMoETimeout(f"{phase}: {me} waited {elapsed:.1f} s for {other}, which did not answer")
        detail = str(error).split("\n")[0].split(". This is typically")[0]
        return MegaMoeError(
            f"{phase}: {me} lost {other}; its process has ended or gave up on this group earlier ({detail})"
        )


def _transport(process_group: dist.ProcessGroup, device: torch.device) -> str:
    """Name the backend that serves `device` in a group, or gloo where only the host is served."""
    for candidate in (device, torch.device("cpu")):
        try:
            return str(process_group._get_backend(candidate).name()).lower()
        except RuntimeError:
            continue
    raise MegaMoeError(
        f"group: no communication backend serves {device} or the CPU; "
        "call init_process_group with 'nccl' for GPUs or 'gloo' for CPUs"
    )


def pack_rows(*columns: Tensor) -> Tensor:
    """Join tensors that describe the same rows into one message, `[num_rows, bytes per row]` uint8.

    Args:
        columns: each `[num_rows, ...]`, any dtype, on one device.
    """
    num_rows = len(columns[0])
    flat = [column.contiguous().view(torch.uint8).reshape(num_rows, _row_bytes(column)) for column in columns]
    return torch.cat(flat, dim=1)


def unpack_rows(message: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Split a message of `pack_rows` into its columns again.

    Args:
        message: `[num_rows, bytes per row]` uint8.
        like: tensors whose dtype and trailing shape are those of the packed columns.
    """
    out: list[Tensor] = []
    start = 0
    for column in like:
        width = _row_bytes(column)
        # a tensor of its own: a slice of the message need not be aligned for the dtype
        part = message[:, start : start + width].clone(memory_format=torch.contiguous_format).reshape(-1)
        out.append(part.view(column.dtype).reshape(len(message), *column.shape[1:]))
        start += width
    assert start == message.shape[1], "the message holds other columns than asked for"
    return out


def _row_bytes(column: Tensor) -> int:
    size = column.element_size()
    for extent in column.shape[1:]:
        size *= extent
    return size
