"""Comparison of a result with its oracle: the measures, the tolerances and a verdict that names the worst row."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["TOLERANCES", "Comparison", "Tolerance", "compare", "diff", "row_diff", "scale_error"]


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """Bounds of one kind of result.

    Attributes:
        diff: bound of `diff` over the whole output.
        row_diff: bound of `row_diff` in the worst row.
        scale_error: bound of `scale_error` over the whole output.
        reason: why these.
    """

    diff: float
    row_diff: float
    scale_error: float
    reason: str


TOLERANCES: dict[str, Tolerance] = {
    "quantised": Tolerance(
        diff=1e-4,
        row_diff=1e-3,
        scale_error=1e-3,
        reason="both sides quantise at the same points, so they differ where the order of FP32 sums turns one E4M3 "
        "rounding of h the other way: a step of at most 1/8 in a few of hundreds of columns",
    ),
    "bf16": Tolerance(
        diff=1e-5,
        row_diff=1e-4,
        scale_error=1e-3,
        reason="h, the slots and y are rounded to BF16 on both sides; two roundings that fall apart everywhere "
        "would be 2^-16 / 6 = 2.5e-6",
    ),
    "fp32": Tolerance(
        diff=1e-10,
        row_diff=1e-9,
        scale_error=1e-5,
        reason="FP32 sums over some thousand terms against float64 leave relative errors of about 1e-6, squared 1e-12",
    ),
}


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The verdict of `compare`.

    Attributes:
        ok: within all bounds, and finite.
        text: one line: every measure beside its bound, the worst row, the verdict.
        kind: key of `TOLERANCES`.
        diff: over the whole output.
        worst_row: index of the worst row (without the last dimension); () where there is none.
        worst_row_diff: its `row_diff`.
        scale_error: over the whole output.
        max_abs_error: largest absolute difference of an element.
        exact_diff: `diff` against unquantised maths, where it was given.
    """

    ok: bool
    text: str
    kind: str
    diff: float
    worst_row: tuple[int, ...]
    worst_row_diff: float
    scale_error: float
    max_abs_error: float
    exact_diff: float | None = None


def diff(x: Tensor, y: Tensor) -> float:
    """Return 1 - 2 <x, y> / (|x|^2 + |y|^2) in float64: 0 for equal, 1 for orthogonal, 2 for opposite; 0 if both are 0.

    Computed as |x - y|^2 / (|x|^2 + |y|^2), which is the same number without the cancellation.
    """
    return float(_diff(_flat(x), _flat(y)))


def row_diff(x: Tensor, y: Tensor) -> Tensor:
    """Return `diff` of each row: `[..., H]` and `[..., H]` to `[...]` float64."""
    return _diff(x.detach().double(), y.detach().double())


def scale_error(x: Tensor, y: Tensor) -> float:
    """Return |<x, y> / <y, y> - 1|: a wrong factor on all of x, which hides in `diff` as its square.

    0 if both are zero, infinite if only y is.
    """
    x, y = _flat(x), _flat(y)
    norm = float(y @ y)
    if norm == 0:
        return 0.0 if float(x @ x) == 0 else math.inf
    return abs(float(x @ y) / norm - 1)


def compare(
    actual: Tensor, expected: Tensor, kind: str, *, exact: Tensor | None = None, equal_nan: bool = False
) -> Comparison:
    """Compare a result with its oracle.

    Args:
        actual: `[..., H]`, any floating dtype.
        expected: the same shape, from an oracle with the same rounding points.
        kind: "quantised", "bf16" or "fp32" (see `TOLERANCES`).
        exact: the same from unquantised maths; its error is reported and decides nothing.
        equal_nan: whether NaN at the same place in both counts as equal. Otherwise any NaN fails.

    Raises:
        ValueError: shapes that differ, or an unknown kind.
    """
    if kind not in TOLERANCES:
        raise ValueError(f"kind: must be one of {', '.join(TOLERANCES)}, got {kind!r}")
    for name, other in (("expected", expected), ("exact", exact)):
        if other is not None and other.shape != actual.shape:
            raise ValueError(f"actual, {name}: expected the same shape, got {list(actual.shape)}, {list(other.shape)}")
    bounds = TOLERANCES[kind]
    x = actual.detach().double().cpu()
    y = expected.detach().double().cpu()
    if x.dim() == 0:
        x, y = x[None], y[None]
    excused = torch.zeros_like(x, dtype=torch.bool)
    if equal_nan:
        excused = x.isnan() & y.isnan()
        x, y = x.masked_fill(excused, 0.0), y.masked_fill(excused, 0.0)

    rows = _diff(x, y)
    bad = ~(x.isfinite() & y.isfinite())
    rows = rows.masked_fill(bad.any(-1), math.inf)
    worst: tuple[int, ...] = ()
    worst_diff = 0.0
    if rows.numel():
        flat = int(rows.argmax())
        worst = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), rows.shape))
        worst_diff = float(rows.flatten()[flat])
    total, scale = diff(x, y), scale_error(x, y)
    max_abs = float((x - y).abs().max()) if x.numel() else 0.0
    exact_diff = None
    if exact is not None:
        z = exact.detach().double().cpu().reshape(x.shape).masked_fill(excused, 0.0)
        exact_diff = diff(x, z)

    failed = []
    if bool(bad.any()):
        # actual is what is judged, so name it first where both are to blame
        name, culprit = ("actual", x) if not bool(x.isfinite().all()) else ("expected", y)
        wrong = (~culprit.isfinite()).nonzero()
        failed.append(f"{len(wrong)} values of {name} are NaN or infinite, the first at {wrong[0].tolist()}")
    # written so that NaN fails
    measures = ((total, bounds.diff), (worst_diff, bounds.row_diff), (scale, bounds.scale_error))
    if not failed and not all(value <= bound for value, bound in measures):
        failed.append("out of tolerance")
    row = "".join(f"[{i}]" for i in worst) or "-"
    text = (
        f"{kind}: diff {total:.2e} (<= {bounds.diff:.0e}), "
        f"worst row {row} {worst_diff:.2e} (<= {bounds.row_diff:.0e}), "
        f"scale error {scale:.2e} (<= {bounds.scale_error:.0e}), max error {max_abs:.2e}"
    )
    if exact_diff is not None:
        text += f", against unquantised maths {exact_diff:.2e}"
    text += f": FAILED, {'; '.join(failed)}" if failed else ": ok"
    return Comparison(
        ok=not failed,
        text=text,
        kind=kind,
        diff=total,
        worst_row=worst,
        worst_row_diff=worst_diff,
        scale_error=scale,
        max_abs_error=max_abs,
        exact_diff=exact_diff,
    )


def _flat(x: Tensor) -> Tensor:
    return x.detach().double().flatten()


def _diff(x: Tensor, y: Tensor) -> Tensor:
    """Return |x - y|^2 / (|x|^2 + |y|^2) along the last dimension, 0 where both are zero."""
    total = x.square().sum(-1) + y.square().sum(-1)
    return torch.where(total == 0, 0.0, (x - y).square().sum(-1) / total)
