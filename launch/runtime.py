"""One rank's place in the run: device, process groups, and the few collectives that the jobs need."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megamoe.config import MoEConfig
from megamoe.errors import ConfigError

__all__ = ["Runtime"]


class Runtime:
    """Set up torch.distributed from torchrun's environment.

    With a GPU per local rank the job runs on them over NCCL. Ranks that have to share a GPU exchange over gloo, since
    NCCL refuses two ranks on one device; so does a machine without a GPU, on the CPU. Ranks form expert-parallel groups
    of consecutive ranks; several groups are data-parallel replicas.

    Args:
        config: the checked configuration.

    Attributes:
        rank, world_size, local_rank: of this process.
        device: where the layers live.
        group: expert-parallel group of this rank (None: a single rank).
        group_rank, group_size: this rank's place in it.
        group_index, num_groups: which group it is, of how many.
    """

    def __init__(self, config: MoEConfig) -> None:
        self.rank = int(os.environ.get("RANK", "0"))
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        self.device = torch.device("cpu")
        if num_gpus:
            self.device = torch.device("cuda", self.local_rank % num_gpus)
            torch.cuda.set_device(self.device)
        self.group_size = config.parallel.expert_parallel_size
        if self.world_size % self.group_size:
            raise ConfigError(
                f"parallel.expert_parallel_size={self.group_size}: does not divide the {self.world_size} ranks"
            )
        self.group_rank = self.rank % self.group_size
        self.group_index = self.rank // self.group_size
        self.num_groups = self.world_size // self.group_size
        # The CPU half of the backend serves the small collectives of the jobs themselves.
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if num_gpus >= local_size else "gloo",
            timeout=timedelta(seconds=config.parallel.timeout_s),
        )
        self.group: Any = dist.group.WORLD
        self.replicas: Any = None  # the ranks that hold the same experts as this one
        if self.num_groups > 1:
            for index in range(self.num_groups):
                ranks = list(range(index * self.group_size, (index + 1) * self.group_size))
                group = dist.new_group(ranks)
                self.group = group if index == self.group_index else self.group
            for place in range(self.group_size):
                group = dist.new_group(list(range(place, self.world_size, self.group_size)))
                self.replicas = group if place == self.group_rank else self.replicas

    def synchronize(self) -> None:
        """Wait for the work that this rank has queued on its GPU."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def all_gather(self, value: Any) -> list[Any]:
        """Gather one small Python object per rank of the world."""
        gathered: list[Any] = [None] * self.world_size
        dist.all_gather_object(gathered, value)
        return gathered

    def gather_rows(self, rows: Tensor, group: Any = None) -> list[Tensor]:
        """Gather tensors that differ in their first dimension, on the CPU.

        Args:
            rows: [num_rows, ...], any device; the other dimensions are alike on all ranks.
            group: process group; None for the expert-parallel group.

        Returns:
            the tensor of each rank of the group, on the CPU.
        """
        group = self.group if group is None else group
        size = dist.get_world_size(group)
        local = rows.detach().cpu().contiguous()
        counts = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
        dist.all_gather(counts, torch.tensor([local.shape[0]]), group=group)
        largest = max(int(count) for count in counts)
        padded = torch.zeros((largest, *local.shape[1:]), dtype=local.dtype)
        padded[: local.shape[0]] = local
        gathered = [torch.empty_like(padded) for _ in range(size)]
        if largest:
            dist.all_gather(gathered, padded, group=group)
        return [part[: int(count)] for part, count in zip(gathered, counts, strict=True)]

    def close(self) -> None:
        """Leave the process group, after every rank has come here."""
        dist.barrier()
        dist.destroy_process_group()
