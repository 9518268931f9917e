"""Who takes part: one view of an expert-parallel group, whatever the caller handed over."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from megamoe.errors import ConfigError

__all__ = ["EXPERT_AXIS", "GroupLike", "RankGroup", "expert_group", "resolve_group"]

# the dimension of a device mesh that is meant when the mesh has several
EXPERT_AXIS = "ep"

GroupLike = dist.ProcessGroup | DeviceMesh | None


@dataclass(frozen=True)
class RankGroup:
    """The ranks that share one set of experts.

    Attributes:
        process_group: the torch process group; None for one rank without torch.distributed.
        rank: this process's index within the group, 0 .. world_size - 1.
        world_size: number of ranks in the group.
        global_ranks: the rank in the default group of each member, in group order.
    """

    process_group: dist.ProcessGroup | None
    rank: int
    world_size: int
    global_ranks: tuple[int, ...]

    def describe(self, rank: int) -> str:
        """Name a member for a message: `rank 2`, or `rank 2 (global rank 6)` where the two differ."""
        if not 0 <= rank < self.world_size or self.global_ranks[rank] == rank:
            return f"rank {rank}"
        return f"rank {rank} (global rank {self.global_ranks[rank]})"


def resolve_group(group: GroupLike) -> RankGroup:
    """Turn a process group, a device mesh or None into a `RankGroup`.

    Args:
        group: a `ProcessGroup` of any subset of the world; a `DeviceMesh` with one dimension or with one called "ep";
            None for one rank on its own, which needs no torch.distributed.

    Raises:
        ConfigError: this process is not in the group, or the mesh does not say which dimension is meant.
        TypeError: something else was given.
    """
    if group is None:
        return RankGroup(None, 0, 1, (0,))
    if isinstance(group, DeviceMesh):
        group = _mesh_group(group)
    # a process outside the group holds a placeholder instead of a process group
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ConfigError("group: this process is not one of its ranks; build the layer only on the ranks of the group")
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group: expected a ProcessGroup, a DeviceMesh or None, got {type(group).__name__}")
    rank = dist.get_rank(group)
    if rank < 0:
        raise ConfigError("group: this process is not one of its ranks; build the layer only on the ranks of the group")
    return RankGroup(group, rank, dist.get_world_size(group), tuple(dist.get_process_group_ranks(group)))


def _mesh_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    names = mesh.mesh_dim_names or ()
    if mesh.ndim == 1:
        return mesh.get_group()
    if EXPERT_AXIS in names:
        return mesh.get_group(EXPERT_AXIS)
    dims = ", ".join(names) if names else f"{mesh.ndim} unnamed dimensions"
    raise ConfigError(
        f"group: a device mesh needs one dimension, or one called '{EXPERT_AXIS}', got {dims}; pass mesh['<name>']"
    )


# size -> (default group, this process's block of it); a block ends with the default group that it was cut from
_blocks: dict[int, tuple[dist.ProcessGroup, dist.ProcessGroup]] = {}


def expert_group(size: int) -> dist.ProcessGroup | None:
    """Return the group of this rank when the world is split into blocks of `size` consecutive ranks.

    Collective over the whole world where the world is larger than one block.

    Args:
        size: ranks that share the experts.

    Returns:
        The group; None for size 1, which needs no torch.distributed.

    Raises:
        ConfigError: torch.distributed is not running, or the world is not a multiple of `size`.
    """
    if size == 1:
        return None
    if not dist.is_initialized():
        raise ConfigError(
            f"parallel.expert_parallel_size is {size} and torch.distributed is not initialised; start the job with "
            "megamoe launch or torchrun and call init_process_group, or set the size to 1"
        )
    world = dist.get_world_size()
    if world % size:
        raise ConfigError(
            f"parallel.expert_parallel_size is {size} and the job has {world} ranks; the ranks must be a multiple of it"
        )
    default = dist.group.WORLD
    assert default is not None, "an initialised torch.distributed has a default group"
    if world == size:
        return default
    if size not in _blocks or _blocks[size][0] is not default:
        # every rank must make every block, in the same order
        for first in range(0, world, size):
            block = dist.new_group(list(range(first, first + size)))
            if isinstance(block, dist.ProcessGroup):  # this rank is in it
                _blocks[size] = (default, block)
    return _blocks[size][1]
