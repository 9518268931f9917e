"""The mega-kernel as a backend of the MoE op: one launch per rank and call, on Hopper GPUs.

Weights come in the canonical layout and are packed on first sight, on the GPU. What is kept: the canonical tensors,
which belong to the caller, and one packed copy of about their size; it is overwritten, at the same addresses, in the
next call after a tensor has changed. A CUDA graph replays with the packed copy, so after a change `packed(experts)`
must run once before the next replay.

A call returns before the kernel has run. What ended it early is raised by the next call or by `workspace.check()`, and
its output is NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from types import SimpleNamespace

import torch
from torch import Tensor

from megamoe.backends.base import Backend, BackendSetup
from megamoe.backends.sharing import Cached, PackedCache, SharedWorkspaces
from megamoe.config import MoESpec
from megamoe.device_workspace import DeviceWorkspace
from megamoe.errors import ConfigError, MegaMoeError
from megamoe.kernels.comparer import guard
from megamoe.kernels.cpu_engine import why_missing
from megamoe.kernels.mega_moe import ACT_SCALES, MegaMoePlan, Prepared
from megamoe.kernels.packing.moe import PackedMoeExperts, pack_moe_experts
from megamoe.kernels.weights import ExpertWeights
from megamoe.workspace import raise_failure

__all__ = ["BACKEND", "MAX_LOCAL_EXPERTS", "Sm90Backend", "unsupported"]

_CAPABILITY = (9, 0)
MAX_LOCAL_EXPERTS = 256  # the schedule's sums of each lie in what the mainloops leave of shared memory
_ALIGNMENT = 16  # bytes of the kernel's vectors
_INPUTS = 3  # x, ids, weights
_MAX_REMEMBERED = 512  # calls: to remember one costs more than to check it

_in_inference_mode = torch.is_inference_mode_enabled
_shared: SharedWorkspaces[DeviceWorkspace] = SharedWorkspaces()


@dataclass
class _Ready:
    """Packed experts and the launch that reads them."""

    packed: PackedMoeExperts
    plan: MegaMoePlan


@dataclass
class _Known:
    """A call that has been made: what the next one is compared with, and what it launches.

    Attributes:
        alike: whether x, ids, weights (and `out`, where it was given) look like those of the call.
        packed: what the experts' packed form was made of, and how far they have changed since then.
        prepared: the launch.
        sizes: number of tokens, and bytes of an id.
    """

    alike: Callable[..., bool]
    packed: Cached[_Ready]
    prepared: Prepared
    sizes: tuple[int, int]


class Sm90Backend(Backend):
    """See the module's docstring."""

    name = "sm90"

    @classmethod
    def unavailable(cls, spec: MoESpec, device: torch.device, world_size: int) -> str | None:
        if device.type != "cuda":
            return f"it runs on NVIDIA Hopper GPUs, the tensors are on {device}"
        if not torch.cuda.is_available():
            return "torch finds no CUDA device"
        capability = torch.cuda.get_device_capability(device)
        if capability != _CAPABILITY:
            major, minor = capability
            return f"it needs a GPU of compute capability 9.0, {device} has {major}.{minor}"
        return unsupported(spec, world_size) or _missing()

    def __init__(self, setup: BackendSetup) -> None:
        self.setup = setup
        self.spec = setup.spec
        self.workspace: DeviceWorkspace = setup.workspace
        if self.workspace is None:
            self.workspace = _shared.get(setup, lambda: _make_workspace(setup))
        if not self.workspace.serves(self.spec, setup.max_tokens_per_rank):
            raise ValueError(
                "workspace: too small for this layer, or made for another parallel.max_tokens_per_rank; "
                "construct it with the specs of all layers"
            )
        self._cache: PackedCache[_Ready] = PackedCache(self.name)
        self._known: dict[tuple[int, bool, bool], _Known] = {}
        self._remembered = 0

    def forward(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, experts: ExpertWeights) -> Tensor:
        """Run the op; see the base class. x that is not BF16 is converted, and the result back.

        Raises:
            ConfigError: more tokens than `max_tokens_per_rank` on one of several ranks. This rank alone raises it,
                because nobody else can know without waiting; with `check` all raise the same error.
            MegaMoETimeout, MegaMoeError: an earlier call failed.
        """
        return self._run(x, topk_ids, topk_weights, experts, None)

    def forward_into(
        self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, experts: ExpertWeights, out: Tensor
    ) -> Tensor:
        """See the base class. The kernel itself writes to a contiguous, aligned BF16 `out`."""
        return self._run(x, topk_ids, topk_weights, experts, out)

    def _run(
        self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, experts: ExpertWeights, out: Tensor | None
    ) -> Tensor:
        entry = self._cache.find(_tensors(experts))
        ready = self._ready(experts) if entry is None else entry.packed
        # addresses alone go to the kernel, so that nothing of autograd has to be taken off
        rows = x if x.dtype is torch.bfloat16 else x.detach().to(torch.bfloat16)
        if not rows.is_contiguous() or rows.data_ptr() % _ALIGNMENT:
            rows = rows.detach().clone(memory_format=torch.contiguous_format)
        ids = topk_ids if topk_ids.is_contiguous() else topk_ids.contiguous()
        weights = topk_weights if topk_weights.is_contiguous() else topk_weights.detach().contiguous()
        y = out if out is not None and _takes_rows(out) else torch.empty_like(rows)
        num_tokens, bound = rows.shape[0], self.setup.max_tokens_per_rank
        if self.setup.check:
            self._check_call(ids)
        if num_tokens <= bound:
            self.workspace.launch(ready.plan, rows, ids, weights, y)
            given = (x, topk_ids, topk_weights) if out is None else (x, topk_ids, topk_weights, out)
            if self._remembered < _MAX_REMEMBERED and not self.setup.check:
                self._remember(entry or self._cache.find(_tensors(experts)), given, (rows, ids, weights, y))
        else:
            self._refuse_overflow(self.workspace.rank, num_tokens)
            for first in range(0, num_tokens, bound):
                part = slice(first, first + bound)
                self.workspace.launch(ready.plan, rows[part], ids[part], weights[part], y[part])
        if out is None:
            return y if y.dtype == x.dtype else y.to(x.dtype)
        return out if y is out else out.copy_(y)

    def again(
        self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, experts: ExpertWeights, out: Tensor | None
    ) -> Tensor | None:
        """See the base class. All that the checks look at is asked again, in the cheapest way."""
        known = self._known.get((x.numel(), out is None, _in_inference_mode()))
        if known is None or not (
            known.alike(x, topk_ids, topk_weights) if out is None else known.alike(x, topk_ids, topk_weights, out)
        ):
            return None
        if not known.packed.fits(_tensors(experts)):
            return None
        y = torch.empty_like(x) if out is None else out
        rows, to = x.data_ptr(), y.data_ptr()
        if (rows | to) % _ALIGNMENT:
            return None
        ids, weights = topk_ids.data_ptr(), topk_weights.data_ptr()
        launched = self.workspace.launch_again(self.spec, known.prepared, rows, ids, weights, to, known.sizes)
        return y if launched else None

    def _remember(self, packed: Cached[_Ready] | None, given: tuple[Tensor, ...], used: tuple[Tensor, ...]) -> None:
        """Keep a call whose tensors went to the kernel as they came, for `again`."""
        num_tokens = given[0].shape[0]
        key = (given[0].numel(), len(given) == _INPUTS, _in_inference_mode())
        known = self._known.get(key)
        if packed is None or (known is not None and known.packed is packed and known.alike(*given)):
            return
        if any(tensor.requires_grad for tensor in given) or any(a is not b for a, b in zip(given, used, strict=False)):
            return
        alike = guard(given)
        if alike is not None:
            self._remembered += 1
            prepared = packed.packed.plan.prepared(num_tokens)
            self._known[key] = _Known(alike, packed, prepared, (num_tokens, given[1].element_size()))

    def packed(self, experts: ExpertWeights) -> PackedMoeExperts:
        """Return the packed form of canonical experts, brought up to date in place when a tensor has changed since."""
        return self._ready(experts).packed

    def unpacked(self, experts: ExpertWeights) -> ExpertWeights:
        """Return canonical experts made from their packed form, byte for byte; biases are the tensors given."""
        w13, w13_scale, w2, w2_scale = self.packed(experts).unpack()
        return ExpertWeights(w13, w2, w13_scale, w2_scale, experts.b13, experts.b2, experts.format)

    def close(self) -> None:
        self._known.clear()
        self._cache.clear()

    def _ready(self, experts: ExpertWeights) -> _Ready:
        return self._cache.get(
            _tensors(experts), lambda: self._pack(experts), lambda ready: self._repack(ready.packed, experts)
        )

    def _pack(self, experts: ExpertWeights) -> _Ready:
        self._refuse_capture()
        experts.validate(self.spec, self.spec.num_experts // self.workspace.world_size)
        assert experts.w13_scale is not None and experts.w2_scale is not None, "MXFP4 weights have scales"
        packed = pack_moe_experts(experts.w13, experts.w13_scale, experts.w2, experts.w2_scale, experts.b13, experts.b2)
        return _Ready(packed, self.workspace.plan(self.spec, packed))

    def _repack(self, packed: PackedMoeExperts, experts: ExpertWeights) -> None:
        """Overwrite the packed form; nothing is allocated that outlives it, so captured graphs stay valid."""
        self._refuse_capture()
        assert experts.w13_scale is not None and experts.w2_scale is not None, "MXFP4 weights have scales"
        for expert in range(packed.num_experts):
            packed.load_expert(
                expert,
                experts.w13[expert],
                experts.w13_scale[expert],
                experts.w2[expert],
                experts.w2_scale[expert],
                None if experts.b13 is None else experts.b13[expert],
                None if experts.b2 is None else experts.b2[expert],
            )

    def _refuse_capture(self) -> None:
        if self.workspace.capturing:
            raise MegaMoeError(
                "backend sm90: weights that are new or have changed are packed with the host's help; call the layer "
                "once before capturing a graph"
            )

    def _refuse_overflow(self, whom: int, num_tokens: int) -> None:
        """Refuse more tokens than the bound on a rank, unless they can come in chunks."""
        bound, world_size = self.setup.max_tokens_per_rank, self.workspace.world_size
        if num_tokens <= bound or (world_size == 1 and self.setup.overflow == "chunk"):
            return
        advice = "raise it" if world_size > 1 else "raise it or set parallel.overflow: chunk"
        raise ConfigError(
            f"parallel.max_tokens_per_rank: {self.setup.collectives.group.describe(whom)} brought {num_tokens} tokens, "
            f"the bound is {bound}; {advice}"
        )

    def _check_call(self, ids: Tensor) -> None:
        """Refuse ids that are no expert and too many tokens, on every rank alike. Waits for the GPU and the ranks."""
        if self.workspace.capturing:
            return
        num_experts, collectives = self.spec.num_experts, self.setup.collectives
        mine = [ids.shape[0], int((ids >= num_experts).sum())]
        for whom, (num_tokens, num_bad) in enumerate(collectives.gather_objects(mine, phase="exchange of counts")):
            if num_bad:
                failure = SimpleNamespace(whom=whom, seen=num_bad, expected=num_experts)
                raise_failure("bad_ids", "publish", failure, group=collectives.group, rank=collectives.rank)
            self._refuse_overflow(whom, num_tokens)


def unsupported(spec: MoESpec, world_size: int) -> str | None:
    """Return why the mega-kernel does not run this op on any GPU (half a sentence), or None when it does."""
    if spec.weight_format != "mxfp4":
        return f"it multiplies mxfp4 weights, this layer has quantization.weights: {spec.weight_format}"
    if spec.act_scale not in ACT_SCALES:
        return (
            f"it takes activation scales per {' or '.join(ACT_SCALES)}, this layer has quantization.act_scale: "
            f"{spec.act_scale}"
        )
    if spec.num_experts % world_size:
        return f"num_experts must be a multiple of the {world_size} ranks, got {spec.num_experts}"
    if spec.num_experts // world_size > MAX_LOCAL_EXPERTS:
        return f"a rank can have {MAX_LOCAL_EXPERTS} experts at most, got {spec.num_experts // world_size}"
    return None


def _missing() -> str | None:
    """Return which part of the install is missing (half a sentence), or None."""
    if find_spec("cuda") is None or find_spec("cuda.core") is None:
        return "cuda.core is not installed (pip install 'megamoe[cuda13]')"
    return why_missing()


def _make_workspace(setup: BackendSetup) -> DeviceWorkspace:
    return DeviceWorkspace(
        [setup.spec], setup.collectives, max_tokens_per_rank=setup.max_tokens_per_rank, comm=setup.comm
    )


def _tensors(experts: ExpertWeights) -> Sequence[Tensor]:
    tensors = [experts.w13, experts.w2]
    for more in (experts.w13_scale, experts.w2_scale, experts.b13, experts.b2):
        if more is not None:
            tensors.append(more)
    return tensors


def _takes_rows(out: Tensor) -> bool:
    """Return whether the kernel can store to it."""
    return out.dtype == torch.bfloat16 and out.is_contiguous() and out.data_ptr() % _ALIGNMENT == 0


BACKEND = Sm90Backend
