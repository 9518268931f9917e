"""The oracle by hand-computed examples, by its invariants, and by changing one thing at a time."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest
import torch
from torch import Tensor

from megamoe.kernels.formats import dequantize_e4m3, quantize_e4m3
from megamoe.kernels.weights import quantize_experts
from megamoe.testing.numeric import compare, diff
from megamoe.testing.oracle import _e4m3_groups, _e4m3_values, _round_e4m3, moe_oracle, moe_oracle_exact


def silu(value: float) -> float:
    return value / (1 + math.exp(-value))


def case(
    tokens: int = 40, experts: int = 6, top_k: int = 3, hidden: int = 256, intermediate: int = 192, seed: int = 0
) -> dict[str, Any]:
    """Return random inputs of `moe_oracle`, with biases, in FP32."""
    torch.manual_seed(seed)
    return {
        "x": torch.randn(tokens, hidden),
        "topk_ids": torch.stack([torch.randperm(experts)[:top_k] for _ in range(tokens)]),
        "topk_weights": torch.rand(tokens, top_k) + 0.1,
        "w13": torch.randn(experts, 2 * intermediate, hidden) * hidden**-0.5,
        "w2": torch.randn(experts, hidden, intermediate) * intermediate**-0.5,
        "b13": torch.randn(experts, 2 * intermediate),
        "b2": torch.randn(experts, hidden),
        "activation": "silu",
    }


# --- by hand ---


def test_one_token_by_hand() -> None:
    x = torch.tensor([[1.0, 2.0]])
    w13 = torch.tensor([[[0.5, 0.25], [1.0, -1.0]]])  # gate = 1, up = -1
    w2 = torch.tensor([[[2.0], [-4.0]]])
    args = (x, torch.tensor([[0]]), torch.tensor([[0.5]]), w13, w2)
    h = -silu(1.0)
    y = moe_oracle(*args, activation="silu")
    assert y.dtype == torch.float32
    assert y.tolist()[0] == pytest.approx([0.5 * 2 * h, 0.5 * -4 * h], rel=1e-6)
    exact = moe_oracle_exact(*args, activation="silu")
    assert exact.dtype == torch.float64
    assert exact.tolist()[0] == pytest.approx([0.5 * 2 * h, 0.5 * -4 * h], rel=1e-14)


def test_biases_and_weight_by_hand() -> None:
    x = torch.tensor([[1.0, 2.0]])
    w13 = torch.tensor([[[0.5, 0.25], [1.0, -1.0]]])
    w2 = torch.tensor([[[2.0], [-4.0]]])
    b13, b2 = torch.tensor([[0.5, 3.0]]), torch.tensor([[10.0, 20.0]])  # gate = 1.5, up = 2
    args = (x, torch.tensor([[0]]), torch.tensor([[0.25]]), w13, w2)
    h = silu(1.5) * 2
    wanted = [0.25 * (2 * h + 10), 0.25 * (-4 * h + 20)]
    for position in ("after", "before"):
        y = moe_oracle(*args, b13=b13, b2=b2, activation="silu", weight_position=position)
        assert y.tolist()[0] == pytest.approx(wanted, rel=1e-6), position
    exact = moe_oracle_exact(*args, b13=b13, b2=b2, activation="silu")
    assert exact.tolist()[0] == pytest.approx(wanted, rel=1e-14)


@pytest.mark.parametrize(
    ("activation", "limit", "alpha", "gate", "up", "wanted"),
    [
        ("silu", None, None, 20.0, 3.0, 20 / (1 + math.exp(-20)) * 3),
        ("swiglu_clamp", 10.0, None, 50.0, 50.0, silu(10.0) * 10),
        ("swiglu_clamp", 10.0, None, 9.99, -50.0, silu(9.99) * -10),
        ("swiglu_clamp", 10.0, None, -50.0, 1.0, -50 * math.exp(-50)),
        ("swiglu_clamp", None, None, 50.0, 2.0, 100.0),
        ("swiglu_oai", 7.0, 1.702, 50.0, 50.0, 7 / (1 + math.exp(-7 * 1.702)) * 8),
        ("swiglu_oai", 7.0, 1.702, 2.0, -50.0, 2 / (1 + math.exp(-2 * 1.702)) * -6),
        ("swiglu_oai", None, 1.0, 2.0, 9.0, silu(2.0) * 10),
        ("silu", None, None, -1000.0, 1.0, 0.0),
    ],
)
def test_activations_by_hand(
    activation: str, limit: float | None, alpha: float | None, gate: float, up: float, wanted: float
) -> None:
    """Case C11."""
    w13 = torch.tensor([[[gate], [up]]], dtype=torch.float64)
    args = (torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1), w13, torch.ones(1, 1, 1).double())
    y = moe_oracle_exact(*args, activation=activation, limit=limit, alpha=alpha)
    assert float(y) == pytest.approx(wanted, rel=1e-9, abs=0)
    rounded = moe_oracle(*args, activation=activation, limit=limit, alpha=alpha, slot_dtype=torch.float32)
    assert float(rounded) == pytest.approx(wanted, rel=1e-6, abs=0)


def test_the_sum_is_in_k_order_in_fp32() -> None:
    # slots 2^24, 1, 1, -2^24 in this order: FP32 loses both ones; any other order keeps one
    values = [2.0**24, 1.0, 1.0, -(2.0**24)]
    x, ids = torch.ones(1, 1), torch.tensor([[0, 1, 2, 3]])
    w13 = torch.tensor([[[100.0], [0.01]]]).expand(4, 2, 1)  # silu(100) * 0.01 = 1
    w2 = torch.tensor(values)[:, None, None]
    args = (x, ids, torch.ones(1, 4), w13.double(), w2.double())
    assert float(moe_oracle(*args, activation="silu", slot_dtype=torch.float32)) == 0.0
    swapped = (x, ids[:, [1, 2, 0, 3]], *args[2:])
    assert float(moe_oracle(*swapped, activation="silu", slot_dtype=torch.float32)) == 2.0
    assert float(moe_oracle(*args, activation="silu", slot_dtype=torch.float64)) == pytest.approx(2.0)


def test_slots_are_rounded_to_bf16_and_y_to_the_dtype_of_x() -> None:
    w13 = torch.tensor([[[100.0], [0.01]]])
    value = 1 + 2.0**-8 + 2.0**-12  # above the middle of two BF16 numbers
    args = (torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1), w13.double(), torch.full((1, 1, 1), value).double())
    one = torch.ones(1, 1)
    assert float(moe_oracle(one, *args, activation="silu")) == 1 + 2.0**-7
    assert float(moe_oracle(one, *args, activation="silu", slot_dtype=torch.float32)) == value
    in_bf16 = moe_oracle(one.bfloat16(), *args, activation="silu", slot_dtype=torch.float32)
    assert in_bf16.dtype == torch.bfloat16 and float(in_bf16) == 1 + 2.0**-7


def test_h_is_rounded_to_the_dtype_of_unquantised_weights() -> None:
    h = 1 + 2.0**-8 + 2.0**-12
    w13 = torch.tensor([[[1000.0], [h / 1000]]], dtype=torch.float64)
    args = (torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1), w13)
    ones = torch.ones(1, 1, 1)
    assert float(moe_oracle(*args, ones, activation="silu", slot_dtype=torch.float32)) == h
    rounded = moe_oracle(*args, ones.bfloat16(), activation="silu", slot_dtype=torch.float32)
    assert float(rounded) == 1 + 2.0**-7


# --- ids ---


def test_an_id_without_expert_is_skipped_and_its_weight_never_read() -> None:
    inputs = case()
    clean = moe_oracle(**inputs)
    ids, weights = inputs["topk_ids"].clone(), inputs["topk_weights"].clone()
    ids[3], weights[3] = -1, math.nan
    ids[5, 1], weights[5, 1] = 6, math.nan  # one id = E
    ids[7, 2], weights[7, 2] = -1, math.inf
    for dtype in (torch.int64, torch.int32):
        y = moe_oracle(**inputs | {"topk_ids": ids.to(dtype), "topk_weights": weights})
        assert torch.isfinite(y).all()
        assert (y[3] == 0).all()
        others = [t for t in range(40) if t not in (3, 5, 7)]
        assert torch.equal(y[others], clean[others])
        assert not torch.equal(y[5], clean[5]) and not torch.equal(y[7], clean[7])
    exact = moe_oracle_exact(**inputs | {"topk_ids": ids, "topk_weights": weights})
    assert torch.isfinite(exact).all() and (exact[3] == 0).all()
    # the skipped slot counts exactly as a weight of zero
    zeros = inputs["topk_weights"].clone()
    zeros[3], zeros[5, 1], zeros[7, 2] = 0, 0, 0
    assert torch.allclose(exact, moe_oracle_exact(**inputs | {"topk_weights": zeros}))


def test_duplicates_add_up() -> None:
    inputs = case(tokens=1, experts=10, top_k=8)
    ids = torch.tensor([[5, 5, 5, 5, 9, 9, -1, 0]])
    weights = inputs["topk_weights"]
    together = torch.zeros(1, 10).index_add(1, ids[0, [0, 1, 2, 3, 4, 5, 7]], weights[:, [0, 1, 2, 3, 4, 5, 7]])
    merged_ids = torch.tensor([[0, 5, 9]])
    wanted = moe_oracle_exact(**inputs | {"topk_ids": merged_ids, "topk_weights": together.gather(1, merged_ids)})
    got = moe_oracle_exact(**inputs | {"topk_ids": ids})
    assert diff(got, wanted) < 1e-13
    assert diff(moe_oracle(**inputs | {"topk_ids": ids}), wanted) < 1e-12


def test_no_tokens_no_experts_chosen() -> None:
    inputs = case(tokens=2)
    empty = inputs | {name: inputs[name][:0] for name in ("x", "topk_ids", "topk_weights")}
    for quantised in ({}, {"weight_format": "mxfp4", "act_scale": "token"}):
        assert moe_oracle(**empty, **quantised).shape == (0, 256)
    nothing = moe_oracle(**inputs | {"topk_ids": torch.full((2, 3), -1)})
    assert (nothing == 0).all()


# --- each option changes the output, and only as much as it should ---


BASE: dict[str, Any] = {"weight_format": "mxfp4", "act_scale": "token", "activation": "swiglu_clamp", "limit": 1.0}
MUTATIONS: list[tuple[str, dict[str, Any]]] = [
    ("no quantisation of x", {"act_scale": "none"}),
    ("x per 128 columns", {"act_scale": "block128"}),
    ("no quantisation of h", {"weight_format": "none"}),
    ("another limit", {"limit": 1.5}),
    ("no limit", {"limit": None}),
    ("another activation", {"activation": "swiglu_oai", "alpha": 1.702}),
    ("no b13", {"b13": None}),
    ("no b2", {"b2": None}),
    ("FP32 slots", {"slot_dtype": torch.float32}),
]


@pytest.mark.parametrize(("what", "change"), MUTATIONS, ids=[what for what, _ in MUTATIONS])
def test_every_option_changes_the_output(what: str, change: dict[str, Any]) -> None:
    inputs = case() | BASE
    before, after = moe_oracle(**inputs), moe_oracle(**inputs | change)
    assert not torch.equal(before, after)
    print(f"{what}: diff {diff(before, after):.2e}")
    rounding_only = {"act_scale", "weight_format", "slot_dtype"}
    if set(change) <= rounding_only:
        assert 1e-7 < diff(before, after) < 3e-3
    else:
        assert diff(before, after) > 3e-3
    if change.get("activation") == "swiglu_oai":
        other_alpha = moe_oracle(**inputs | change | {"alpha": 1.0})
        assert diff(after, other_alpha) > 1e-3


def test_the_weight_position_moves_a_rounding() -> None:
    inputs = case()
    low = inputs | {name: inputs[name].bfloat16() for name in ("w13", "w2")}
    in_bf16 = diff(moe_oracle(**low), moe_oracle(**low, weight_position="before"))
    # an E4M3 group has a free scale: a factor on the whole row goes into it and leaves the codes as they are
    quantised = diff(moe_oracle(**inputs | BASE), moe_oracle(**inputs | BASE, weight_position="before"))
    print(f"BF16 {in_bf16:.2e}, quantised {quantised:.2e}")
    assert 1e-8 < in_bf16 < 1e-5 and quantised < 1e-6
    # unless the factor takes h, below 1 here, under half of the smallest code 2^-9 times the smallest scale 2^-126
    tiny = inputs | BASE | {"topk_weights": torch.full((40, 3), 2.0**-137), "b2": None, "slot_dtype": torch.float64}
    tiny["x"] = inputs["x"].double()
    after, before = moe_oracle(**tiny), moe_oracle(**tiny, weight_position="before")
    assert (before == 0).all() and (after != 0).any()


@pytest.mark.parametrize("weight_format", ["fp8_block", "mxfp4"])
def test_both_quantised_formats_round_alike(weight_format: str) -> None:
    inputs = case() | BASE
    assert torch.equal(moe_oracle(**inputs), moe_oracle(**inputs | {"weight_format": weight_format}))


@pytest.mark.parametrize("name", ["x", "topk_weights", "w13", "w2", "b13", "b2"])
def test_one_wrong_number_shows(name: str) -> None:
    """A test whose oracle ignored an operand would pass for the wrong reason."""
    inputs = case() | BASE | {"activation": "silu", "limit": None}
    before = moe_oracle(**inputs)
    wrong = inputs[name].clone()
    index = (int(inputs["topk_ids"][0, 0]), 1) if name in ("w13", "w2", "b13", "b2") else (0, 1)
    wrong[index] += wrong.abs().max() * 2
    after = moe_oracle(**inputs | {name: wrong})
    assert not torch.equal(before[0], after[0])
    verdict = compare(after, before, "quantised")
    print(name, verdict.text)
    assert not verdict.ok


def test_the_error_against_unquantised_maths() -> None:
    inputs = case(tokens=200)
    names = ("x", "topk_ids", "topk_weights", "b13", "b2", "activation")
    exact = moe_oracle_exact(**inputs)
    errors = {}
    for weight_format, act_scale in (("none", "none"), ("fp8_block", "block128"), ("mxfp4", "token")):
        w13, w2 = quantize_experts(inputs["w13"], inputs["w2"], None, None, weight_format).dequantize()
        y = moe_oracle(
            **{name: inputs[name] for name in names}, w13=w13, w2=w2, weight_format=weight_format, act_scale=act_scale
        )
        errors[weight_format] = diff(y, exact)
    print(errors)
    assert errors["none"] < 1e-12 < errors["fp8_block"] < 2e-3 < errors["mxfp4"] < 2e-2


# --- the oracle's own E4M3 ---


def test_table_of_e4m3() -> None:
    values = _e4m3_values()
    assert len(values) == 127 and values == sorted(values)
    assert values[:3] == [0, 2.0**-9, 2.0**-8] and values[8] == 2.0**-6 and values[0x38] == 1 and values[-1] == 448
    # torch's own decoding is a third definition
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn)
    assert torch.equal(codes.double(), torch.tensor(values, dtype=torch.float64))


def test_rounding_to_e4m3() -> None:
    table = torch.tensor(_e4m3_values(), dtype=torch.float64)
    middles = (table[1:] + table[:-1]) / 2
    below, above = middles * (1 - 1e-15), middles * (1 + 1e-15)
    assert torch.equal(_round_e4m3(table), table) and torch.equal(_round_e4m3(-table), -table)
    assert torch.equal(_round_e4m3(below), table[:-1]) and torch.equal(_round_e4m3(above), table[1:])
    even = torch.where(torch.arange(126) % 2 == 0, table[:-1], table[1:])
    assert torch.equal(_round_e4m3(middles), even) and torch.equal(_round_e4m3(-middles), -even)
    odd = _round_e4m3(torch.tensor([1e9, -449.0, math.inf, -0.0, math.nan], dtype=torch.float64))
    assert odd[:3].tolist() == [448, -448, 448]
    assert math.copysign(1, float(odd[3])) == -1 and odd[4].isnan()


@pytest.mark.parametrize(("granularity", "width"), [("token", 300), ("block128", 128)])
def test_groups_agree_with_the_formats_bit_for_bit(granularity: str, width: int) -> None:
    """Two implementations that share nothing: a table in float64 here, conversions of torch there."""
    torch.manual_seed(4)
    x = torch.randn(400, 300) * torch.logspace(-42, 37, 400, dtype=torch.float64)[:, None].float()
    x[:200] = x[:200].bfloat16().float()  # many ties
    x[0], x[5, 7], x[6, 8] = 0.0, math.inf, -math.inf
    x[9, 3] = math.nan
    oracle = _e4m3_groups(x.double(), width)
    formats = dequantize_e4m3(*quantize_e4m3(x, granularity), granularity)
    assert torch.equal(oracle.float().nan_to_num(nan=-1), formats.nan_to_num(nan=-1))
    assert oracle.isnan().sum() == 1


# --- costs and refusals ---


def test_it_is_fast_enough_for_real_runs() -> None:
    inputs = case(tokens=500, experts=32, top_k=6, hidden=256, intermediate=128)
    start = time.perf_counter()
    y = moe_oracle(**inputs, weight_format="mxfp4", act_scale="token")
    seconds = time.perf_counter() - start
    print(f"500 tokens, 32 experts, H = 256: {seconds:.3f} s")
    assert torch.isfinite(y).all() and seconds < 10


def test_low_precision_inputs() -> None:
    inputs: dict[str, Any] = {
        name: value.bfloat16()
        if isinstance(value, Tensor) and value.is_floating_point() and name != "topk_weights"
        else value
        for name, value in case().items()
    }
    y = moe_oracle(**inputs)
    assert y.dtype == torch.bfloat16
    assert diff(y, moe_oracle_exact(**inputs)) < 1e-5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"activation": "situ"}, "activation: must be one of silu, swiglu_clamp, swiglu_oai, got 'situ'"),
        ({"act_scale": "row"}, "act_scale: must be one of"),
        ({"weight_format": "int4"}, "weight_format: must be one of"),
        ({"weight_position": "during"}, "weight_position: must be one of after, before"),
        ({"activation": "swiglu_oai"}, "alpha: swiglu_oai needs it"),
    ],
)
def test_unknown_words_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        moe_oracle(**case() | change)
