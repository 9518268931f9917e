"""Packing and unpacking are inverse, byte for byte."""

from __future__ import annotations

import pytest
import torch
from helpers_moe import make_problem

pytest.importorskip("megamoe._host", reason="the C++ engine is not built")

from helpers_engine import make_spec

from megamoe.kernels.packed import CpuLayout, as_packed, pack_experts, unpack_experts
from megamoe.kernels.weights import ExpertWeights

NAMES = ("w13", "w2", "w13_scale", "w2_scale")


def random_experts(form: str, hidden: int, intermediate: int, dtype: torch.dtype) -> tuple:
    spec = make_spec(hidden=hidden, intermediate=intermediate, num_experts=3, weight_format=form)
    experts = make_problem(spec, dtype=dtype).weights
    if form == "mxfp4":  # every byte must survive, not just those that a quantiser makes
        for tensor in (experts.w13, experts.w2, experts.w13_scale, experts.w2_scale):
            assert tensor is not None
            tensor.copy_(torch.randint(0, 256, tensor.shape, dtype=torch.uint8))
    return spec, experts


def same(a: ExpertWeights, b: ExpertWeights) -> bool:
    def raw(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.contiguous().view(torch.uint8)

    pairs = [(getattr(a, name), getattr(b, name)) for name in NAMES]
    return all((x is None and y is None) or torch.equal(raw(x), raw(y)) for x, y in pairs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("form", ["none", "mxfp4", "fp8_block"])
@pytest.mark.parametrize(("hidden", "intermediate"), [(128, 64), (192, 320), (96, 160), (32, 32)])
def test_round_trip(form: str, hidden: int, intermediate: int, dtype: torch.dtype) -> None:
    spec, experts = random_experts(form, hidden, intermediate, dtype)
    packed = pack_experts(experts, spec, num_threads=3)
    assert same(unpack_experts(packed), experts)
    if hidden % 64 == 0 and intermediate % 64 == 0:
        assert packed.w13.nbytes == experts.w13.nbytes and packed.w2.nbytes == experts.w2.nbytes


def test_odd_sizes_of_plain_weights() -> None:
    spec, experts = random_experts("none", 50, 33, torch.bfloat16)
    assert same(unpack_experts(pack_experts(experts, spec)), experts)


@pytest.mark.parametrize(("num_threads", "steps"), [(1, [(1, 3), (2, 3), (3, 3)]), (2, [(2, 3), (3, 3)])])
def test_progress_is_told(num_threads: int, steps: list[tuple[int, int]]) -> None:
    spec, experts = random_experts("mxfp4", 128, 64, torch.float32)
    seen: list[tuple[int, int]] = []
    layout = CpuLayout(num_threads)
    packed = layout.pack("w13", experts.w13, experts.w13_scale, spec, progress=lambda *step: seen.append(step))
    assert seen == steps
    assert torch.equal(packed[0], pack_experts(experts, spec).w13)


def test_sizes_of_another_op_are_refused() -> None:
    spec, experts = random_experts("mxfp4", 128, 64, torch.float32)
    packed = pack_experts(experts, spec)
    as_packed(ExpertWeights(packed.w13, packed.w2, packed.w13_scale, packed.w2_scale, format="mxfp4"), spec)
    with pytest.raises(ValueError, match="w2: 3 experts in the layout cpu are"):
        as_packed(ExpertWeights(packed.w13, packed.w13, packed.w13_scale, packed.w2_scale, format="mxfp4"), spec)
