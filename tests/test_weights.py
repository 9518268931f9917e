"""Canonical expert weights: layouts, round trips and what `validate` refuses."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from megamoe.config import MoESpec
from megamoe.errors import ConfigError
from megamoe.kernels.formats import dequantize_e4m3_weight, dequantize_mxfp4, quantize_e4m3_weight, quantize_mxfp4
from megamoe.kernels.weights import WEIGHT_FORMATS, ExpertWeights, quantize_experts

# (H, I): even, no multiple of 128, gpt-oss at its real size, I = 320 (blocks of up start anew)
SIZES = [(256, 128), (64, 32), (256, 320), (2880, 2880)]


def make_spec(hidden: int, intermediate: int, weight_format: str, *, bias: bool = False) -> MoESpec:
    return MoESpec(
        hidden=hidden,
        intermediate=intermediate,
        num_experts=8,
        top_k=2,
        weight_format=weight_format,
        expert_bias=bias,
    )


def random_experts(
    hidden: int, intermediate: int, num: int = 3, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return (
        torch.randn(num, 2 * intermediate, hidden).to(dtype),
        torch.randn(num, hidden, intermediate).to(dtype),
        torch.randn(num, 2 * intermediate).to(dtype),
        torch.randn(num, hidden).to(dtype),
    )


@pytest.mark.parametrize("weight_format", WEIGHT_FORMATS)
@pytest.mark.parametrize(("hidden", "intermediate"), SIZES)
def test_every_format_validates_and_dequantises(hidden: int, intermediate: int, weight_format: str) -> None:
    num = 1 if hidden > 1000 else 3
    w13, w2, b13, b2 = random_experts(hidden, intermediate, num)
    experts = quantize_experts(w13, w2, b13, b2, weight_format)
    experts.validate(make_spec(hidden, intermediate, weight_format, bias=True), num)
    assert experts.num_experts == num and experts.format == weight_format
    back13, back2 = experts.dequantize()
    assert back13.dtype == back2.dtype == torch.float32
    bound = {"none": 0.0, "fp8_block": 0.03, "mxfp4": 0.12}[weight_format]
    for name, back, original in (("w13", back13, w13), ("w2", back2, w2)):
        assert back.shape == original.shape
        error = float((back - original).norm() / original.norm())
        print(f"{weight_format} {name} ({hidden}, {intermediate}): relative error {error:.4f}")
        assert error <= bound
        assert weight_format == "none" or error > bound / 3, "nothing was quantised"
    assert torch.equal(experts.dequantize(torch.bfloat16)[0], back13.bfloat16())
    assert experts.b13 is not None and experts.b2 is not None
    assert torch.equal(experts.b13, b13) and torch.equal(experts.b2, b2)


def test_fp8_block_scales_start_anew_with_up() -> None:
    hidden, intermediate = 256, 320
    w13, w2, _, _ = random_experts(hidden, intermediate)
    w13[:, intermediate:] *= 1000  # a block that spanned both halves would lose the gate's last 64 rows
    experts = quantize_experts(w13, w2, None, None, "fp8_block")
    assert experts.w13_scale is not None and experts.w2_scale is not None
    assert experts.w13_scale.shape == (3, 6, 2) and experts.w2_scale.shape == (3, 2, 3)
    for rows, blocks in ((slice(0, 320), slice(0, 3)), (slice(320, 640), slice(3, 6))):
        codes, scale = quantize_e4m3_weight(w13[:, rows])
        assert torch.equal(experts.w13[:, rows].float(), codes.float())
        assert torch.equal(experts.w13_scale[:, blocks], scale)
        assert torch.equal(experts.dequantize()[0][:, rows], dequantize_e4m3_weight(codes, scale))
    error = (experts.dequantize()[0] - w13)[:, :intermediate].norm() / w13[:, :intermediate].norm()
    assert error < 0.03


def test_mxfp4_is_the_format_expert_by_expert() -> None:
    w13, w2, _, _ = random_experts(64, 96)
    experts = quantize_experts(w13, w2, None, None, "mxfp4")
    for index in range(3):
        for name, original in (("w13", w13), ("w2", w2)):
            codes, scales = quantize_mxfp4(original[index])
            assert torch.equal(getattr(experts, name)[index], codes)
            assert torch.equal(getattr(experts, f"{name}_scale")[index], scales)
    assert experts.w13_scale is not None
    assert torch.equal(experts.dequantize()[0], dequantize_mxfp4(experts.w13, experts.w13_scale))


@pytest.mark.parametrize("weight_format", WEIGHT_FORMATS)
def test_select_are_views_of_the_same_experts(weight_format: str) -> None:
    w13, w2, b13, b2 = random_experts(64, 96, num=4)
    experts = quantize_experts(w13, w2, b13, b2, weight_format)
    part = experts.select(1, 3)
    part.validate(make_spec(64, 96, weight_format, bias=True), 2)
    whole13, whole2 = experts.dequantize()
    part13, part2 = part.dequantize()
    assert torch.equal(part13, whole13[1:3]) and torch.equal(part2, whole2[1:3])
    assert part.w13.data_ptr() == experts.w13[1].data_ptr(), "a view, not a copy"
    assert part.nbytes * 2 == experts.nbytes
    assert experts.select(2, 2).num_experts == 0
    assert experts.select(0, 4).nbytes == experts.nbytes
    for first, last in ((-1, 2), (0, 5), (3, 2)):
        with pytest.raises(ValueError, match=r"expected a range within 0\.\.4"):
            experts.select(first, last)


def test_nbytes() -> None:
    w13, w2, b13, b2 = random_experts(256, 128, num=2)
    elements = 2 * 3 * 256 * 128
    assert quantize_experts(w13, w2, None, None, "none").nbytes == elements * 4
    assert quantize_experts(w13.bfloat16(), w2.bfloat16(), None, None, "none").nbytes == elements * 2
    assert quantize_experts(w13, w2, None, None, "mxfp4").nbytes == elements // 2 + elements // 32
    assert quantize_experts(w13, w2, None, None, "fp8_block").nbytes == elements + elements // 128**2 * 4
    with_bias = quantize_experts(w13, w2, b13, b2, "mxfp4")
    assert with_bias.nbytes == elements // 2 + elements // 32 + 2 * (256 + 256) * 4


def test_plain_weights_are_taken_as_they_are_and_keep_their_gradient() -> None:
    w13, w2, b13, b2 = random_experts(64, 32, dtype=torch.bfloat16)
    w13.requires_grad_()
    experts = quantize_experts(w13, w2, b13, b2, "none")
    assert experts.w13 is w13 and experts.w2 is w2 and experts.b13 is b13 and experts.b2 is b2
    experts.dequantize()[0].sum().backward()
    assert w13.grad is not None and torch.equal(w13.grad, torch.ones_like(w13))


@pytest.mark.parametrize("weight_format", ["fp8_block", "mxfp4"])
def test_quantising_takes_views_low_precision_and_parameters(weight_format: str) -> None:
    w13, w2, b13, b2 = random_experts(64, 96, dtype=torch.bfloat16)
    wanted = quantize_experts(w13.float(), w2.float(), b13.float(), b2.float(), weight_format)
    views = (w13.transpose(1, 2).contiguous().transpose(1, 2), w2.transpose(1, 2).contiguous().transpose(1, 2))
    assert not views[0].is_contiguous()
    for given13, given2 in (views, (torch.nn.Parameter(w13), torch.nn.Parameter(w2))):
        got = quantize_experts(given13, given2, b13, b2, weight_format)
        got.validate(make_spec(64, 96, weight_format, bias=True), 3)
        for field in dataclasses.fields(ExpertWeights):
            one, other = getattr(got, field.name), getattr(wanted, field.name)
            assert one == other if field.name == "format" else torch.equal(one.float(), other.float()), field.name
            assert field.name == "format" or not one.requires_grad


@pytest.mark.parametrize("weight_format", WEIGHT_FORMATS)
def test_no_experts_and_zero_experts(weight_format: str) -> None:
    w13, w2, _, _ = random_experts(64, 96)
    none = quantize_experts(w13[:0], w2[:0], None, None, weight_format)
    none.validate(make_spec(64, 96, weight_format), 0)
    assert none.dequantize()[0].shape == (0, 192, 64)
    w13[1], w2[1] = 0, 0  # an expert that is all zeros, among others
    zero = quantize_experts(w13, w2, None, None, weight_format)
    back13, back2 = zero.dequantize()
    assert (back13[1] == 0).all() and (back2[1] == 0).all()
    assert (back13[0] != 0).any() and torch.isfinite(back13).all()


@pytest.mark.parametrize("weight_format", WEIGHT_FORMATS)
def test_meta_tensors_have_the_same_shapes(weight_format: str) -> None:
    w13, w2, b13, b2 = random_experts(64, 96)
    real = quantize_experts(w13, w2, b13, b2, weight_format)
    meta = quantize_experts(w13.to("meta"), w2.to("meta"), b13.to("meta"), b2.to("meta"), weight_format)
    meta.validate(make_spec(64, 96, weight_format, bias=True), 3)
    assert meta.nbytes == real.nbytes


REFUSED = [
    ("mxfp4", "w13", lambda t: t[:, :-2], r"^w13: expected uint8 \[3, 192, 32\], got uint8 \[3, 190, 32\]$"),
    (
        "mxfp4",
        "w13_scale",
        lambda t: t.float(),
        r"^w13_scale: expected uint8 \[3, 192, 2\], got float32 \[3, 192, 2\]$",
    ),
    ("mxfp4", "w2_scale", lambda t: None, r"^w2_scale: expected uint8 \[3, 64, 3\], got None$"),
    ("mxfp4", "w2", lambda t: t.mT.contiguous().mT, r"^w2: must be contiguous, got the strides \[3072, 1, 64\]$"),
    ("fp8_block", "w13", lambda t: t.view(torch.uint8), r"^w13: expected float8_e4m3fn \[3, 192, 64\], got uint8"),
    (
        "fp8_block",
        "w13_scale",
        lambda t: t[:, :1],
        r"^w13_scale: expected float32 \[3, 2, 1\], got float32 \[3, 1, 1\]$",
    ),
    ("none", "w2", lambda t: t.half(), r"^w2: expected bfloat16 or float32 \[3, 64, 96\], got float16"),
    ("none", "w2", lambda t: t.bfloat16(), r"^w2: expected float32 as w13 is, got bfloat16$"),
    (
        "none",
        "w13_scale",
        lambda t: torch.ones(1),
        r"^w13_scale: expected None with the format none, got float32 \[1\]$",
    ),
    ("none", "b2", lambda t: t[0], r"^b2: expected bfloat16 or float32 \[3, 64\], got float32 \[64\]$"),
    ("none", "b13", lambda t: None, r"^b13: expected bfloat16 or float32 \[3, 192\], got None$"),
    ("none", "w13", lambda t: t.to("meta"), r"^w2: must be on meta as w13 is, got cpu$"),
]


@pytest.mark.parametrize(("weight_format", "name", "change", "message"), REFUSED)
def test_validate_names_tensor_rule_and_value(weight_format: str, name: str, change, message: str) -> None:
    experts = quantize_experts(*random_experts(64, 96), weight_format)
    spec = make_spec(64, 96, weight_format, bias=True)
    experts.validate(spec, 3)
    setattr(experts, name, change(getattr(experts, name)))
    with pytest.raises(ValueError, match=message):
        experts.validate(spec, 3)


def test_validate_against_another_op() -> None:
    experts = quantize_experts(*random_experts(64, 96), "mxfp4")
    with pytest.raises(ValueError, match="format: expected fp8_block, got mxfp4"):
        experts.validate(make_spec(64, 96, "fp8_block", bias=True), 3)
    with pytest.raises(ValueError, match=r"w13: expected uint8 \[4, 192, 32\], got uint8 \[3, 192, 32\]"):
        experts.validate(make_spec(64, 96, "mxfp4", bias=True), 4)
    with pytest.raises(ValueError, match=r"b13: expected None with expert_bias=False, got float32 \[3, 192\]"):
        experts.validate(make_spec(64, 96, "mxfp4"), 3)


def test_wrong_arguments() -> None:
    w13, w2, _, _ = random_experts(64, 96)
    with pytest.raises(ConfigError, match="format: must be one of none, fp8_block, mxfp4, got 'int4'"):
        quantize_experts(w13, w2, None, None, "int4")
    with pytest.raises(ConfigError, match="got 'int4'"):
        ExpertWeights(w13, w2, format="int4").dequantize()
    with pytest.raises(
        ValueError, match=r"expected \[E, 2I, H\] and \[E, H, I\], got \[3, 192, 64\] and \[3, 96, 64\]"
    ):
        quantize_experts(w13, w2.mT, None, None, "none")
    with pytest.raises(ValueError, match="w13: expected three dimensions"):
        quantize_experts(w13[0], w2[0], None, None, "mxfp4")
    with pytest.raises(ValueError, match="multiple of 32"):
        quantize_experts(torch.ones(1, 80, 64), torch.ones(1, 64, 40), None, None, "mxfp4")
    with pytest.raises(ValueError, match="w13_scale, w2_scale: the format mxfp4 needs both"):
        ExpertWeights(w13.to(torch.uint8), w2.to(torch.uint8), format="mxfp4").dequantize()
