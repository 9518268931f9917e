"""Where the ranks of a group are, and whether their GPUs reach each other: asked before memory is allocated."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

import torch

from megamoe.comm.collectives import Collectives
from megamoe.comm.groups import RankGroup
from megamoe.errors import BackendUnavailable

__all__ = ["Place", "check_peer_access", "place_of", "reaches", "shared_gpus", "unreachable"]

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
# pairs that an error spells out
_MAX_PAIRS = 8


@dataclass(frozen=True)
class Place:
    """Where one rank is.

    Attributes:
        host: name of its host.
        boot: the host's boot id, which tells two hosts of one name apart; "" where there is none.
        gpu: UUID of its GPU; "" without one.
        index: the GPU's index among those that the process sees; -1 without one.
    """

    host: str
    boot: str
    gpu: str = ""
    index: int = -1


def place_of(device: torch.device) -> Place:
    """Return where this process is, with `device` as its own."""
    boot = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
    if device.type != "cuda":
        return Place(socket.gethostname(), boot)
    index = torch.cuda.current_device() if device.index is None else device.index
    return Place(socket.gethostname(), boot, _uuid(index), index)


def reaches(own: Place, peer: Place) -> bool | None:
    """Return whether the GPU of this process can access a peer's memory; None when this process does not see that GPU.

    A process that sees its own GPU alone (CUDA_VISIBLE_DEVICES) cannot ask CUDA about others.
    """
    if own.gpu == peer.gpu:
        return True
    for index in range(torch.cuda.device_count()):
        if _uuid(index) == peer.gpu:
            return bool(torch.cuda.can_device_access_peer(own.index, index))
    return None


def check_peer_access(
    name: str,
    collectives: Collectives,
    *,
    find: Callable[[torch.device], Place] = place_of,
    probe: Callable[[Place, Place], bool | None] = reaches,
) -> list[Place]:
    """Refuse a group in which some rank cannot address the memory of another. Collective; allocates nothing.

    Args:
        name: of the backend that asks, for the message.
        collectives: exchanges over the group; their device is the one in question.
        find: returns the place of this process.
        probe: returns whether the GPU of the first place can access that of the second, None where it cannot tell.

    Returns:
        The place of every rank.

    Raises:
        BackendUnavailable: on every rank alike: hosts differ, or pairs have no peer access; the message names them.
    """
    phase = f"preflight of {name}"
    own = collectives.run_together(lambda: find(collectives.device), phase=phase)
    places = [Place(*report) for report in collectives.gather_objects(astuple(own), phase=phase)]
    reason = _hosts_differ(name, places, collectives.group)
    if reason is None and own.gpu:
        row = collectives.run_together(lambda: [probe(own, peer) for peer in places], phase=phase)
        reason = unreachable(name, places, collectives.gather_objects(row, phase=phase), collectives.group)
    if reason is not None:
        raise BackendUnavailable(reason)
    return places


def unreachable(
    name: str, places: Sequence[Place], rows: Sequence[Sequence[bool | None]], group: RankGroup
) -> str | None:
    """Return the sentence that names the pairs without peer access, or None when there are none.

    Args:
        name: of the backend that asks.
        places: of every rank.
        rows: `rows[a][b]`: whether rank a reaches rank b; None counts as reached, for the driver to decide.
        group: names the ranks.
    """
    pairs = [
        (a, b) for a in range(len(rows)) for b in range(a + 1, len(rows)) if rows[a][b] is False or rows[b][a] is False
    ]
    if not pairs:
        return None
    named = [
        f"{group.describe(a)} (cuda:{places[a].index}) and {group.describe(b)} (cuda:{places[b].index})"
        for a, b in pairs[:_MAX_PAIRS]
    ]
    more = f" and {len(pairs) - _MAX_PAIRS} more" if len(pairs) > _MAX_PAIRS else ""
    return (
        f"parallel.comm: {name} needs peer access between all GPUs of a group, and there is none between "
        f"{'; '.join(named)}{more}; see `nvidia-smi topo -p2p r`, and take a group whose GPUs share NVLink"
    )


def shared_gpus(places: Sequence[Place]) -> list[tuple[int, int]]:
    """Return the pairs of ranks that torch takes for ranks on one GPU: equal GPU, or equal index on one host."""
    return [
        (a, b)
        for a in range(len(places))
        for b in range(a + 1, len(places))
        if places[a].gpu == places[b].gpu or places[a].index == places[b].index
    ]


def _hosts_differ(name: str, places: Sequence[Place], group: RankGroup) -> str | None:
    for rank, place in enumerate(places):
        if (place.host, place.boot) != (places[0].host, places[0].boot):
            return (
                f"parallel.comm: {name} needs all ranks of a group on one host, got {group.describe(0)} on "
                f"{places[0].host} and {group.describe(rank)} on {place.host}; make parallel.expert_parallel_size a "
                "divisor of the ranks per host"
            )
    return None


def _uuid(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)
