"""The mega-kernel by the names of DeepGEMM's public interface: the caller owns buffer, weights and quantised tokens.

    buffer = megamoe.get_symm_buffer_for_mega_moe(group, num_experts, max_tokens, top_k, hidden, intermediate)
    l1, l2 = megamoe.transform_weights_for_mega_moe((w13, w13_scale), (w2, w2_scale))
    buffer.x[:n].copy_(x_fp8); buffer.x_sf[:n].copy_(x_scale)
    buffer.topk_idx[:n].copy_(ids); buffer.topk_weights[:n].copy_(weights)
    megamoe.fp8_fp4_mega_moe(y, l1, l2, buffer)

Names, argument order and numeric defaults are those of https://github.com/deepseek-ai/DeepGEMM (README, "Mega MoE"):
routing weights go in before the second linear, activations have an FP32 scale per 128 columns. `act_scale="token"`, an
argument that is not among theirs, gives them one a token. What else differs is said at each function.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from megamoe.backends.sm90 import MAX_LOCAL_EXPERTS, Sm90Backend
from megamoe.comm.collectives import Collectives
from megamoe.comm.groups import GroupLike, resolve_group
from megamoe.config import MoESpec
from megamoe.device_workspace import DeviceWorkspace
from megamoe.errors import BackendUnavailable, ConfigError
from megamoe.kernels.formats import MXFP4_GROUP, ue8m0_encode
from megamoe.kernels.mega_moe import ACT_SCALES, MegaMoePlan, published_row_bytes, workspace_numbers
from megamoe.kernels.packing.moe import MOE_LAYOUT, PackedMoeExperts, pack_moe_experts
from megamoe.kernels.packing.packed import PackedWeight
from megamoe.kernels.packing.tiles import tile_layout

__all__ = [
    "SymmBuffer",
    "destroy_localizer",
    "fp8_fp4_mega_moe",
    "get_symm_buffer_for_mega_moe",
    "get_symm_buffer_size_for_mega_moe",
    "localize",
    "transform_weights_for_mega_moe",
]

_MMA_TYPE = "fp8xfp4"
_ACTIVATION = "swiglu"
_RECIPE = (1, 1, 32)
_COLUMNS = 128  # that share a scale with act_scale="block128"
_ALIGNMENT = 16
_MAX_TOP_K = 16
_INTERLEAVE_ROWS = 256  # what the rows of a packed w13 are padded to

Pair = tuple[Tensor, Tensor]


class SymmBuffer:
    """Symmetric memory of one op, and the views that a caller fills before each call. Construction is collective.

    Made by `get_symm_buffer_for_mega_moe`.

    Attributes:
        nbytes: of symmetric memory on this rank; `get_symm_buffer_size_for_mega_moe` tells it beforehand.
        buffer: all of it, `[nbytes]` uint8.
        x: float8_e4m3fn `[num_max_tokens_per_rank, hidden]`.
        x_sf: FP32 `[num_max_tokens_per_rank, hidden / 128]`, its rows apart by a multiple of 16 bytes; with
            `act_scale="token"` `[num_max_tokens_per_rank, 1]`.
        topk_idx: int64 `[num_max_tokens_per_rank, num_topk]`, global expert ids; -1 means no expert.
        topk_weights: FP32 `[num_max_tokens_per_rank, num_topk]`.
        workspace: the `DeviceWorkspace` below, for `check()` and `reset()`.
    """

    def __init__(
        self,
        group: GroupLike,
        spec: MoESpec,
        num_max_tokens_per_rank: int,
        *,
        device: torch.device,
        comm: str,
        timeout_s: float,
    ) -> None:
        ranks = resolve_group(group)
        collectives = Collectives(ranks, device, timeout_s)
        collectives.run_together(lambda: _require(spec, device, ranks.world_size), phase="construction of the buffer")
        self.group = group
        self.num_experts, self.num_topk = spec.num_experts, spec.top_k
        self.hidden, self.intermediate_hidden = spec.hidden, spec.intermediate
        self.num_max_tokens_per_rank = num_max_tokens_per_rank
        self._spec = spec
        self.workspace = DeviceWorkspace([spec], collectives, max_tokens_per_rank=num_max_tokens_per_rank, comm=comm)
        self.nbytes = self.workspace.nbytes
        self.buffer: Tensor = self.workspace.tensor
        self._make_views()

    def _make_views(self) -> None:
        numbers = workspace_numbers(self._spec, self.workspace.limits)
        tokens, scales = self.num_max_tokens_per_rank, _scales(self._spec)
        input_bytes, scale_bytes = published_row_bytes(self._spec)

        def view(name: str, row_bytes: int, dtype: torch.dtype) -> Tensor:
            return self.buffer[numbers[name] :][: tokens * row_bytes].view(dtype).view(tokens, -1)

        self.x = view("input", input_bytes, torch.float8_e4m3fn)
        x_sf = view("scales", scale_bytes, torch.float32)[:, :scales]
        self.x_sf = x_sf.as_subclass(_ScaleView)
        # only this rank's kernel reads these two: they need not be symmetric
        device = self.buffer.device
        self.topk_idx = torch.full((tokens, self.num_topk), -1, dtype=torch.int64, device=device)
        self.topk_weights = torch.zeros((tokens, self.num_topk), dtype=torch.float32, device=device)
        self._first_rows: dict[int, tuple[Tensor, Tensor]] = {}
        # l1 weights -> plans; weights that the caller drops take their plans with them
        self._plans: Any = WeakIdKeyDictionary()

    def destroy(self) -> None:
        """Give the memory back. Idempotent."""
        self._plans.clear()
        self._first_rows.clear()
        self.workspace.close()

    def _rows(self, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Return the first rows of ids and weights; a view costs as much as a launch's checks, so it is kept."""
        rows = self._first_rows.get(num_tokens)
        if rows is None:
            rows = self._first_rows[num_tokens] = (self.topk_idx[:num_tokens], self.topk_weights[:num_tokens])
        return rows

    def _plan(self, l1_weights: Pair, l2_weights: Pair, clamp: float | None) -> MegaMoePlan:
        key = (l1_weights[0].data_ptr(), l1_weights[1].data_ptr(), l2_weights[0].data_ptr(), clamp)
        plans = self._plans.get(l1_weights[0])
        if plans is None:
            plans = self._plans[l1_weights[0]] = {}
        plan: MegaMoePlan | None = plans.get(key)
        if plan is None:
            num_local = self.num_experts // self.workspace.world_size
            experts = _packed(l1_weights, l2_weights, num_local, self.hidden, self.intermediate_hidden)
            plan = plans[key] = self.workspace.plan(_with_clamp(self._spec, clamp), experts)
        return plan


class _ScaleView(Tensor):
    """FP32 scales that refuse integers: packed UE8M0 would be taken for numbers, in silence."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.copy_ and len(args) > 1 and isinstance(args[0], cls) and isinstance(args[1], Tensor):
            if not args[1].is_floating_point():
                raise TypeError(
                    f"x_sf: expected FP32 scales, got {args[1].dtype}; packed UE8M0 scales are not taken here, "
                    "quantise with FP32 scales (powers of two are fine)"
                )
        return super().__torch_function__(func, types, args, kwargs or {})


def get_symm_buffer_for_mega_moe(
    group: GroupLike,
    num_experts: int,
    num_max_tokens_per_rank: int,
    num_topk: int,
    hidden: int,
    intermediate_hidden: int,
    use_fp8_dispatch: bool | None = None,
    mma_type: str = _MMA_TYPE,
    activation: str = _ACTIVATION,
    *,
    act_scale: str = "block128",
    device: torch.device | str | None = None,
    comm: str = "auto",
    timeout_s: float = 600.0,
) -> SymmBuffer:
    """Allocate the symmetric memory of an op. Collective over the group.

    Args:
        group: the ranks that share the experts; None = this rank alone.
        num_experts: of all ranks.
        num_max_tokens_per_rank: most tokens of a call; it is not rounded up.
        num_topk: experts of a token.
        hidden, intermediate_hidden: multiples of 32; they need not be multiples of 128.
        use_fp8_dispatch: tokens travel as E4M3; None or True.
        mma_type: "fp8xfp4".
        activation: "swiglu".
        act_scale: of x, "block128" or "token".
        device: None = the current GPU.
        comm: as `parallel.comm`: "auto", "local", "symm_mem", "nvshmem".
        timeout_s: bound of every wait on another rank, seconds.

    Raises:
        BackendUnavailable: the kernel does not run this op, or not here.
        ConfigError: sizes that do not fit together, or ranks that disagree.
        ValueError: another `mma_type` or `activation`.
    """
    num_ranks = resolve_group(group).world_size
    _check_numbers(num_ranks, num_experts, num_max_tokens_per_rank, num_topk, hidden, intermediate_hidden)
    spec = _spec(num_experts, num_topk, hidden, intermediate_hidden, use_fp8_dispatch, mma_type, activation, act_scale)
    if device is None and not torch.cuda.is_available():
        raise BackendUnavailable("get_symm_buffer_for_mega_moe: torch finds no CUDA device")
    chosen = torch.device("cuda", torch.cuda.current_device()) if device is None else torch.device(device)
    return SymmBuffer(group, spec, num_max_tokens_per_rank, device=chosen, comm=comm, timeout_s=timeout_s)


def get_symm_buffer_size_for_mega_moe(
    num_ranks: int,
    num_experts: int,
    num_max_tokens_per_rank: int,
    num_topk: int,
    hidden: int,
    intermediate_hidden: int,
    mma_type: str = _MMA_TYPE,
    activation: str = _ACTIVATION,
    *,
    act_scale: str = "block128",
) -> int:
    """Return the bytes of symmetric memory of one rank, without allocating anything; arguments as for the buffer.

    Raises:
        ConfigError: sizes that do not fit together.
        ValueError: another `mma_type` or `activation`.
    """
    _check_numbers(num_ranks, num_experts, num_max_tokens_per_rank, num_topk, hidden, intermediate_hidden)
    spec = _spec(num_experts, num_topk, hidden, intermediate_hidden, None, mma_type, activation, act_scale)
    return DeviceWorkspace.bytes_for([spec], world_size=num_ranks, max_tokens_per_rank=num_max_tokens_per_rank)


def transform_weights_for_mega_moe(
    l1_weights: Pair, l2_weights: Pair, activation: str = _ACTIVATION
) -> tuple[Pair, Pair]:
    """Pack MXFP4 weights for the kernel, on the device where they are.

    Args:
        l1_weights: codes int8 or uint8 `[E, 2 I, H / 2]`, gate rows first, the low nibble being the even k; and scales
            per row and 32 of K: UE8M0 bytes `[E, 2 I, H / 32]` (uint8 or float8_e8m0fnu), four of them in an int32
            `[E, 2 I, H / 128]`, or FP32 powers of two `[E, 2 I, H / 32]`.
        l2_weights: likewise `[E, H, I / 2]` and its scales.
        activation: "swiglu".

    Returns:
        For each linear (uint8 `[E, row blocks, k blocks, block bytes]`, FP32 `[E, rows]`), for `fp8_fp4_mega_moe`.

    Raises:
        TypeError: a dtype that is not among these; weights that are not quantised.
        ValueError: shapes that do not belong together, an FP32 scale that is no power of two, another activation.
    """
    _check_word("activation", activation, _ACTIVATION)
    packed = pack_moe_experts(*_canonical("l1_weights", l1_weights), *_canonical("l2_weights", l2_weights))
    return (packed.w13.data, packed.w13.row_scale), (packed.w2.data, packed.w2.row_scale)


def fp8_fp4_mega_moe(
    y: Tensor,
    l1_weights: Pair,
    l2_weights: Pair,
    sym_buffer: SymmBuffer,
    cumulative_local_expert_recv_stats: Tensor | None = None,
    recipe: Sequence[int] = _RECIPE,
    activation: str = _ACTIVATION,
    activation_clamp: float | None = None,
    fast_math: bool = True,
) -> None:
    """Run the op on the first `len(y)` rows of the buffer's views, on the current stream. Collective over the group.

    The routing weight is multiplied in before the second linear. Nothing is waited for; a failure is raised by the next
    call or by `sym_buffer.workspace.check()`, and its output is NaN. Can be captured in a CUDA graph, after one call
    with these weights outside.

    Args:
        y: BF16 `[num_tokens, hidden]`, contiguous, 16-byte aligned; num_tokens may differ between ranks and be 0.
        l1_weights, l2_weights: of `transform_weights_for_mega_moe`, all experts of this rank.
        sym_buffer: holds x, its scales, ids and weights.
        cumulative_local_expert_recv_stats: int32 `[experts of this rank]`; the rows that each got are added.
        recipe: (1, 1, 32): weights have a scale per row and 32 of K.
        activation: "swiglu".
        activation_clamp: gate is clamped to it from above, up to it on both sides; None = no clamp.
        fast_math: accepted; the kernel's exp and division are the fast ones either way.

    Raises:
        ValueError: a shape, dtype or recipe outside the above.
        MegaMoETimeout, MegaMoeError: an earlier call failed.
    """
    _check_word("activation", activation, _ACTIVATION)
    if tuple(recipe) != _RECIPE:
        raise ValueError(f"recipe: must be {_RECIPE}, a weight scale per row and 32 of K, got {tuple(recipe)}")
    num_tokens, hidden, bound = y.shape[0], sym_buffer.hidden, sym_buffer.num_max_tokens_per_rank
    if y.dim() != 2 or y.shape[1] != hidden or y.dtype != torch.bfloat16 or num_tokens > bound:
        raise ValueError(
            f"y: must be torch.bfloat16 [num_tokens, {hidden}] with at most {bound} tokens, got {y.dtype} "
            f"{list(y.shape)}"
        )
    if not y.is_contiguous() or y.data_ptr() % _ALIGNMENT or y.device != sym_buffer.buffer.device:
        raise ValueError(
            f"y: must be contiguous, aligned to {_ALIGNMENT} bytes and on {sym_buffer.buffer.device}, got strides "
            f"{y.stride()} on {y.device}"
        )
    received = cumulative_local_expert_recv_stats
    num_local = sym_buffer.num_experts // sym_buffer.workspace.world_size
    if received is not None and (
        tuple(received.shape) != (num_local,) or received.dtype != torch.int32 or received.device != y.device
    ):
        raise ValueError(
            f"cumulative_local_expert_recv_stats: must be torch.int32 [{num_local}] on {y.device}, got "
            f"{received.dtype} {list(received.shape)} on {received.device}"
        )
    plan = sym_buffer._plan(l1_weights, l2_weights, activation_clamp)
    ids, weights = sym_buffer._rows(num_tokens)
    sym_buffer.workspace.launch(plan, None, ids, weights, y, received=received)


def localize(t: Tensor) -> Tensor:
    """Return `t`: a Hopper GPU has one memory, so there is nothing to bring nearer."""
    return t


def destroy_localizer() -> None:
    """Do nothing: `localize` keeps nothing."""


# ---- arguments ------------------------------------------------------------------------------------------------------


def _check_word(name: str, word: str, only: str) -> None:
    if word != only:
        raise ValueError(f"{name}: must be {only!r}, got {word!r}")


def _check_numbers(
    num_ranks: int, num_experts: int, num_max_tokens: int, num_topk: int, hidden: int, intermediate: int
) -> None:
    numbers = {
        "num_ranks": num_ranks,
        "num_experts": num_experts,
        "num_max_tokens_per_rank": num_max_tokens,
        "num_topk": num_topk,
        "hidden": hidden,
        "intermediate_hidden": intermediate,
    }
    for name, number in numbers.items():
        if type(number) is not int or number < 1:
            raise ConfigError(f"{name}: must be a whole number of 1 or more, got {number!r}")
    for name in ("hidden", "intermediate_hidden"):
        if numbers[name] % MXFP4_GROUP:
            raise ConfigError(f"{name}: must be a multiple of {MXFP4_GROUP}, got {numbers[name]}")
    if num_experts % num_ranks or num_experts // num_ranks > MAX_LOCAL_EXPERTS:
        raise ConfigError(
            f"num_experts: must be a multiple of the {num_ranks} ranks, at most {MAX_LOCAL_EXPERTS} on each, got "
            f"{num_experts}"
        )
    if num_topk > min(num_experts, _MAX_TOP_K):
        raise ConfigError(
            f"num_topk: must be at most {min(num_experts, _MAX_TOP_K)} of {num_experts} experts, got {num_topk}"
        )


def _spec(
    num_experts: int,
    num_topk: int,
    hidden: int,
    intermediate: int,
    use_fp8_dispatch: bool | None,
    mma_type: str,
    activation: str,
    act_scale: str,
) -> MoESpec:
    _check_word("mma_type", mma_type, _MMA_TYPE)
    _check_word("activation", activation, _ACTIVATION)
    if use_fp8_dispatch is False:
        raise ValueError("use_fp8_dispatch: tokens travel as E4M3, got False; use None or True")
    if act_scale not in ACT_SCALES:
        raise ValueError(f"act_scale: must be 'token' or 'block128', got {act_scale!r}")
    return MoESpec(
        hidden=hidden,
        intermediate=intermediate,
        num_experts=num_experts,
        top_k=num_topk,
        activation="silu",
        weight_position="before",
        weight_format="mxfp4",
        act_scale=act_scale,
    )


def _with_clamp(spec: MoESpec, clamp: float | None) -> MoESpec:
    if clamp is None:
        return spec
    return dataclasses.replace(spec, activation="swiglu_clamp", swiglu_limit=float(clamp))


def _require(spec: MoESpec, device: torch.device, world_size: int) -> None:
    reason = Sm90Backend.unavailable(spec, device, world_size)
    if reason is not None:
        raise BackendUnavailable(f"mega_moe: the kernel cannot run here: {reason}")


def _scales(spec: MoESpec) -> int:
    """Return the scales of a row of x."""
    return 1 if spec.act_scale == "token" else -(-spec.hidden // _COLUMNS)


def _canonical(name: str, weights: Any) -> Pair:
    """Return (codes, UE8M0 scales) as uint8."""
    if isinstance(weights, Tensor):
        raise TypeError(
            f"{name}: expected (codes, scales) of MXFP4 weights, got {weights.dtype} alone; weights that are not "
            "quantised are not taken here"
        )
    pair = weights if isinstance(weights, (tuple, list)) else ()
    if len(pair) != 2 or not all(isinstance(part, Tensor) for part in pair) or pair[0].dim() != 3:
        raise TypeError(f"{name}: expected (codes, scales), two tensors with experts and rows in front")
    codes, scales = pair
    if codes.dtype not in (torch.uint8, torch.int8):
        raise TypeError(f"{name}: expected MXFP4 codes in torch.uint8 or torch.int8, got {codes.dtype}")
    codes = codes.view(torch.uint8)
    expected = (*codes.shape[:-1], codes.shape[-1] * 2 // MXFP4_GROUP)
    if scales.dtype == torch.int32:
        scales = scales.contiguous().view(torch.uint8)
        if 0 < scales.shape[-1] - expected[-1] < 4:  # the last word of a row may have bytes to spare
            scales = scales[..., : expected[-1]]
    elif scales.dtype == torch.float32:
        scales = ue8m0_encode(scales, exact=True)
    elif scales.dtype in (torch.uint8, torch.float8_e8m0fnu):
        scales = scales.view(torch.uint8)
    else:
        raise TypeError(
            f"{name}: expected UE8M0 scales in torch.uint8, torch.float8_e8m0fnu, four in a torch.int32, or FP32 "
            f"powers of two, got {scales.dtype}"
        )
    if tuple(scales.shape) != expected:
        raise ValueError(f"{name}: codes {list(codes.shape)} need scales {list(expected)}, got {list(scales.shape)}")
    return codes, scales


def _packed(l1_weights: Pair, l2_weights: Pair, num_local: int, hidden: int, intermediate: int) -> PackedMoeExperts:
    """Return transformed weights as the launch takes them, after a look at their shapes."""
    rows1 = -(-2 * intermediate // _INTERLEAVE_ROWS) * _INTERLEAVE_ROWS
    tiles = tile_layout(MOE_LAYOUT)
    rows2 = tiles.grid(hidden, intermediate)[0] * tiles.block_rows
    return PackedMoeExperts(
        w13=_packed_weight("l1_weights", l1_weights, num_local, rows1, hidden),
        w2=_packed_weight("l2_weights", l2_weights, num_local, rows2, intermediate),
        b13=None,
        b2=None,
        hidden=hidden,
        intermediate=intermediate,
    )


def _packed_weight(name: str, weights: Pair, num_local: int, rows: int, columns: int) -> PackedWeight:
    data, scale = weights
    tiles = tile_layout(MOE_LAYOUT)
    expected = (num_local, *tiles.grid(rows, columns), tiles.block_bytes)
    if data.dtype != torch.uint8 or tuple(data.shape) != expected or tuple(scale.shape) != (num_local, rows):
        raise ValueError(
            f"{name}: expected transform_weights_for_mega_moe's uint8 {list(expected)} and FP32 {[num_local, rows]}, "
            f"got {data.dtype} {list(data.shape)} and {list(scale.shape)}"
        )
    if not (data.is_contiguous() and scale.is_contiguous()):
        raise ValueError(f"{name}: must be contiguous, as transform_weights_for_mega_moe returns them")
    # aliases: the caller's own tensors stay free to go
    return PackedWeight(MOE_LAYOUT, tiles.version, data.detach(), scale.detach(), rows, columns, side=[], reports=[])
