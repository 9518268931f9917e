"""Packing and unpacking are inverse, byte for byte, in new memory and in place."""

from __future__ import annotations

import pytest
import torch
from helpers_moe import make_problem

pytest.importorskip("megamoe._host", reason="the C++ engine is not built")

from helpers_engine import make_spec

from megamoe.kernels.packed import can_pack_in_place, pack_experts, unpack_experts
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


def clone(experts: ExpertWeights) -> ExpertWeights:
    parts = {n: None if getattr(experts, n) is None else getattr(experts, n).clone() for n in NAMES}
    return ExpertWeights(**parts, format=experts.format)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("form", ["none", "mxfp4", "fp8_block"])
@pytest.mark.parametrize(("hidden", "intermediate"), [(128, 64), (192, 320), (96, 160), (32, 32)])
def test_round_trip(form: str, hidden: int, intermediate: int, dtype: torch.dtype) -> None:
    spec, experts = random_experts(form, hidden, intermediate, dtype)
    packed = pack_experts(experts, spec, num_threads=3)
    assert same(unpack_experts(packed), experts)
    assert can_pack_in_place(spec, dtype) == (hidden % 64 == 0 and intermediate % 64 == 0)
    copy = clone(experts)
    if not can_pack_in_place(spec, dtype):
        with pytest.raises(ValueError, match="multiples of 64"):
            pack_experts(copy, spec, in_place=True)
        assert same(copy, experts)
        return
    addresses = [getattr(copy, n).data_ptr() for n in NAMES if getattr(copy, n) is not None]
    inside = pack_experts(copy, spec, in_place=True, num_threads=2)
    assert inside.w13.data_ptr() == copy.w13.data_ptr()
    assert addresses == [getattr(copy, n).data_ptr() for n in NAMES if getattr(copy, n) is not None]
    assert torch.equal(inside.w13, packed.w13) and torch.equal(inside.w2, packed.w2)
    assert same(unpack_experts(inside), experts)


def test_odd_sizes_of_plain_weights() -> None:
    spec, experts = random_experts("none", 50, 33, torch.bfloat16)
    assert same(unpack_experts(pack_experts(experts, spec)), experts)


def test_progress_is_told() -> None:
    spec, experts = random_experts("mxfp4", 128, 64, torch.float32)
    seen: list[tuple[int, int]] = []
    pack_experts(experts, spec, num_threads=1, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(i, 6) for i in range(1, 7)]
