"""The measures, the tolerances and the verdict: each must be able to fail."""

from __future__ import annotations

import math

import pytest
import torch

from megamoe.testing.numeric import TOLERANCES, compare, diff, row_diff, scale_error


def test_diff_by_hand() -> None:
    x, y = torch.tensor([3.0, 4.0]), torch.tensor([4.0, 3.0])
    assert diff(x, y) == pytest.approx(1 - 2 * 24 / 50)
    assert diff(x, x) == 0
    assert diff(x, -x) == 2
    assert diff(x, torch.tensor([4.0, -3.0])) == 1
    assert diff(x, torch.zeros(2)) == 1
    assert diff(torch.zeros(2), torch.zeros(2)) == 0
    assert diff(torch.empty(0, 8), torch.empty(0, 8)) == 0
    assert math.isnan(diff(torch.tensor([1.0, math.nan]), x))


def test_diff_is_the_definition_without_its_cancellation() -> None:
    torch.manual_seed(0)
    x = torch.randn(100, 64)
    for noise in (1e-1, 1e-3, 1e-5):
        y = x + noise * torch.randn(100, 64)
        a, b = x.double(), y.double()
        by_definition = 1 - 2 * float((a * b).sum()) / float((a * a).sum() + (b * b).sum())
        assert diff(x, y) == pytest.approx(by_definition, rel=1e-3, abs=1e-15)
    assert diff(x.double(), x.double() * (1 + 1e-12)) == pytest.approx(0.5e-24, rel=1e-2)


def test_row_diff() -> None:
    x = torch.ones(2, 3, 4)
    y = x.clone()
    y[1, 2] = -1
    y[0, 1] = 0
    assert row_diff(x, y).tolist() == [[0, 1, 0], [0, 0, 2]]
    assert row_diff(torch.zeros(2, 4), torch.zeros(2, 4)).tolist() == [0, 0]


def test_scale_error_sees_what_diff_hides() -> None:
    torch.manual_seed(1)
    y = torch.randn(50, 64)
    x = 1.01 * y
    assert diff(x, y) < 1e-4
    assert scale_error(x, y) == pytest.approx(0.01, rel=1e-4)
    assert scale_error(y, y) == pytest.approx(0, abs=1e-15)
    assert scale_error(torch.zeros(3), torch.zeros(3)) == 0
    assert scale_error(torch.ones(3), torch.zeros(3)) == math.inf
    result = compare(x, y, "quantised")
    assert not result.ok and "out of tolerance" in result.text


@pytest.mark.parametrize("kind", TOLERANCES)
def test_just_inside_and_just_outside_of_each_bound(kind: str) -> None:
    bounds = TOLERANCES[kind]
    torch.manual_seed(2)
    y = torch.randn(400, 64, dtype=torch.float64)
    noise = torch.randn_like(y)
    noise -= (noise * y).sum() / (y * y).sum() * y  # orthogonal to y, so that the scale stays
    noise *= y.norm() / noise.norm()

    def off_by(target: float) -> torch.Tensor:
        return y + math.sqrt(2 * target) * noise  # |x - y|^2 / 2|y|^2 = target

    assert compare(off_by(bounds.diff * 0.9), y, kind).ok
    assert not compare(off_by(bounds.diff * 1.1), y, kind).ok

    def one_row_off(target: float) -> torch.Tensor:
        x = y.clone()
        row = torch.zeros(64, dtype=torch.float64)
        row[0], row[1] = y[7, 1], -y[7, 0]
        x[7] += row * (y[7].norm() / row.norm()) * math.sqrt(2 * target)
        return x

    inside, outside = (
        compare(one_row_off(bounds.row_diff * 0.9), y, kind),
        compare(one_row_off(bounds.row_diff * 1.1), y, kind),
    )
    assert inside.ok, inside.text
    assert not outside.ok and outside.diff <= bounds.diff and outside.worst_row == (7,)
    scale = bounds.scale_error
    if scale**2 / 2 < bounds.diff:
        assert compare(y * (1 + scale * 0.9), y, kind).ok
        assert not compare(y * (1 + scale * 1.1), y, kind).ok
        assert not compare(y * (1 - scale * 1.1), y, kind).ok


def test_the_text_names_the_worst_row_and_every_bound() -> None:
    torch.manual_seed(3)
    y = torch.randn(4, 5, 64)
    x = y.clone()
    x[2, 3] *= 8
    result = compare(x, y, "quantised", exact=y)
    print(result.text)
    assert not result.ok and result.worst_row == (2, 3)
    for part in ("quantised", "worst row [2][3]", "(<= 1e-04)", "(<= 1e-03)", "FAILED", "against unquantised maths"):
        assert part in result.text
    assert "\n" not in result.text
    assert result.max_abs_error == pytest.approx(float(7 * y[2, 3].abs().max()), rel=1e-6)
    good = compare(y, y, "quantised", exact=x)
    assert good.ok and good.text.endswith(": ok") and good.diff == 0
    assert good.exact_diff == diff(y, x) > 0.1, "the error against unquantised maths decides nothing"
    assert good.worst_row_diff == 0 and compare(y, y, "bf16").exact_diff is None


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_or_infinity_is_never_ok(bad: float) -> None:
    y = torch.ones(3, 4)
    x = y.clone()
    x[1, 2] = bad
    for actual, expected, name in ((x, y, "actual"), (y, x, "expected"), (x, x, "actual")):
        result = compare(actual, expected, "quantised")
        assert not result.ok and result.worst_row == (1,)
        assert f"1 values of {name} are NaN or infinite, the first at [1, 2]" in result.text
    assert not compare(torch.full((3, 4), math.nan), torch.full((3, 4), math.nan), "bf16").ok


def test_equal_nan_excuses_the_same_places_only() -> None:
    y = torch.ones(3, 4)
    y[1] = math.nan
    assert compare(y, y, "bf16", equal_nan=True).ok
    more = y.clone()
    more[2, 0] = math.nan
    assert not compare(more, y, "bf16", equal_nan=True).ok
    assert not compare(y, more, "bf16", equal_nan=True).ok
    wrong = y.clone()
    wrong[0, 0] = 2
    assert not compare(wrong, y, "bf16", equal_nan=True).ok
    infinite = torch.tensor([[math.inf, 1.0]])
    assert not compare(infinite, infinite, "bf16", equal_nan=True).ok


def test_a_row_that_must_be_zero_must_be_zero() -> None:
    y = torch.randn(1000, 64)
    y[17] = 0
    x = y.clone()
    assert compare(x, y, "quantised").ok
    x[17, 3] = 1e-20
    result = compare(x, y, "quantised")
    assert not result.ok and result.worst_row == (17,)


def test_empty_scalar_and_low_precision() -> None:
    assert compare(torch.empty(0, 64), torch.empty(0, 64), "quantised").ok
    assert compare(torch.empty(0, 64), torch.empty(0, 64), "quantised").worst_row == ()
    assert compare(torch.tensor(1.0), torch.tensor(1.0), "fp32").ok
    assert not compare(torch.tensor(1.0), torch.tensor(2.0), "fp32").ok
    y = torch.randn(200, 64)
    result = compare(y.bfloat16(), y, "bf16")
    assert result.ok and 5e-7 < result.diff < 2.5e-6, "one rounding to BF16 is well within its tolerance"


def test_wrong_arguments() -> None:
    y = torch.ones(3, 4)
    with pytest.raises(ValueError, match="kind: must be one of quantised, bf16, fp32, got 'fp8'"):
        compare(y, y, "fp8")
    with pytest.raises(ValueError, match=r"actual, expected: expected the same shape, got \[3, 4\], \[4, 3\]"):
        compare(y, y.t(), "bf16")
    with pytest.raises(ValueError, match="actual, exact"):
        compare(y, y, "bf16", exact=y[0])


def test_tolerances_are_the_documented_ones() -> None:
    quantised = TOLERANCES["quantised"]
    assert (quantised.diff, quantised.row_diff, quantised.scale_error) == (1e-4, 1e-3, 1e-3)
    assert TOLERANCES["bf16"].diff == 1e-5
    assert all(len(tolerance.reason) > 20 for tolerance in TOLERANCES.values())
