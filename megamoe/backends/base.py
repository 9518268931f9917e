"""What a backend of the MoE op is, and what it is built from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from megamoe.comm.collectives import Collectives
from megamoe.config import MoESpec
from megamoe.kernels.weights import ExpertLayout, ExpertWeights

__all__ = ["Backend", "BackendSetup", "Gradients"]


@dataclass(frozen=True, kw_only=True)
class BackendSetup:
    """Everything that a backend is built from; equal on every rank of the group, except `collectives.rank`.

    Attributes:
        spec: the resolved numbers of the op.
        collectives: bounded exchanges over the group; holds rank, world size and the timeout.
        device: where x and the weights live.
        max_tokens_per_rank: tokens that one rank may bring to one call.
        overflow: "chunk" or "error": what happens above that bound.
        check: checked mode; ids and the order of calls are verified.
        comm: name of the communication backend, "auto" to choose.
        workspace: symmetric memory that the caller owns and shares between layers, or None.
    """

    spec: MoESpec
    collectives: Collectives
    device: torch.device
    max_tokens_per_rank: int
    overflow: str
    check: bool
    comm: str = "auto"
    workspace: Any = None


@dataclass(frozen=True)
class Gradients:
    """Gradients of the op's inputs, each shaped and typed as the input; None where the input does not exist."""

    x: Tensor
    topk_weights: Tensor
    w13: Tensor
    w2: Tensor
    b13: Tensor | None
    b2: Tensor | None


class Backend(ABC):
    """One way to run the MoE op. A module `megamoe.backends.<name>` exposes its class as `BACKEND`.

    Attributes:
        name: as `kernel.backend` spells it.
        differentiable: whether `backward` exists for the format `none`.
        layout: the packed layout that `forward` takes besides the canonical one; None = the canonical one alone.
    """

    name: ClassVar[str]
    differentiable: ClassVar[bool] = False
    layout: ExpertLayout | None = None

    @classmethod
    @abstractmethod
    def unavailable(cls, spec: MoESpec, device: torch.device, world_size: int) -> str | None:
        """Return why this backend cannot run here (half a sentence), or None when it can."""

    @abstractmethod
    def __init__(self, setup: BackendSetup) -> None:
        """Allocate what the backend needs. Collective: every rank of the group constructs it."""

    @abstractmethod
    def forward(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, experts: ExpertWeights) -> Tensor:
        """Run the op.

        Args:
            x: `[num_tokens, hidden]`.
            topk_ids: `[num_tokens, top_k]` int32 or int64.
            topk_weights: `[num_tokens, top_k]` FP32.
            experts: this rank's experts, canonical or in `layout`.

        Returns:
            `[num_tokens, hidden]` in x.dtype.
        """

    def forward_into(
        self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, experts: ExpertWeights, out: Tensor
    ) -> Tensor:
        """Run the op as `forward` does, write the result to `out`, shaped and typed as x, and return it."""
        return out.copy_(self.forward(x, topk_ids, topk_weights, experts))

    def again(
        self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, experts: ExpertWeights, out: Tensor | None
    ) -> Tensor | None:
        """Run a call that looks like one that has been made, in the shortest way; None, and nothing done, else."""
        return None

    def backward(
        self,
        grad: Tensor,
        x: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        experts: ExpertWeights,
        needed: Sequence[bool],
    ) -> Gradients:
        """Return the gradients of the inputs for `grad` `[num_tokens, hidden]`, recomputing what they need.

        `needed` says which of x, topk_weights, w13, b13, w2, b2 want one; communication must not depend on it.
        """
        raise NotImplementedError(f"backend {self.name} has no backward")

    def close(self) -> None:  # noqa: B027 - most backends own nothing
        """Free what the backend owns. Idempotent."""
