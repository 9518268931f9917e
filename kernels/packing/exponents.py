"""MXFP4 scales as one FP32 scale per row and a small relative exponent per group.

The tensor core multiplies E4M3 bytes, so a weight is decoded to the E4M3 number E2M1 * 2^(s - 5), and what is left of
its scale must be the same for a whole row, because it is multiplied in after the sum over K:

    E2M1 * 2^(code - 127) = (E2M1 * 2^(s - 5)) * row scale,  row scale = 2^(base - 122),  code = base + s

`s` is 0..11: at 11 the largest magnitude is 6 * 2^6 = 384 (E4M3 ends at 448), at 0 the smallest is 0.5 * 2^-5 = 2^-6
(a normal E4M3). `base` is the row's largest scale code minus 11, and at least -4, where the row scale is 2^-126; so the
row scale is a normal FP32 for every code 0..254 (base <= 243), and a row is exact when its codes span at most 11.
Groups of zeros don't count: they get the nearest legal s, and a code that s doesn't give back is remembered.

A row that spans more keeps its largest exponents; the groups below `base` are rounded to nearest even at s = 0, without
a sign ever changing. A scale code of 255 makes the row scale NaN. Such rows keep all their original bytes aside.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from megamoe.kernels.formats import MXFP4_GROUP

__all__ = ["MAX_EXPONENT", "ExponentReport", "RelativeExponents", "SideTable", "canonical_rows", "relative_exponents"]

MAX_EXPONENT = 11
GROUP_BYTES = MXFP4_GROUP // 2

_MIN_BASE = -4  # row scale 2^-126, the smallest normal FP32
_SCALE_EXPONENT_OF_BASE_0 = 5  # FP32 exponent field of 2^(0 - 122)
_FP32_NAN = 0x7FC00000
_SCALE_NAN = 255
_MAGNITUDES = 0x7777777777777777  # of 16 codes: all bits but the signs
_HALVES = (0, 1, 2, 3, 4, 6, 8, 12)  # magnitudes of E2M1 in halves
_MAX_SHIFT = 5  # 6 * 2^-5 < 0.25 rounds to zero, as everything smaller does


@dataclass(frozen=True)
class ExponentReport:
    """How much of a set of rows the packed form doesn't hold exactly.

    Attributes:
        inexact_rows: rows whose scale exponents span more than 11.
        inexact_groups: groups of 32 in them that lie below the exponents kept, groups of zeros left out.
        changed_elements: elements of those groups whose value changed in the rounding.
        nan_rows: rows with the scale code 255 (NaN as a whole).
        max_span: the largest span of a row, NaN rows and groups of zeros left out.
    """

    inexact_rows: int = 0
    inexact_groups: int = 0
    changed_elements: int = 0
    nan_rows: int = 0
    max_span: int = 0

    @property
    def exact(self) -> bool:
        """Whether every row is held exactly (NaN rows count as exact: they are NaN before and after)."""
        return self.inexact_rows == 0

    def __str__(self) -> str:
        if self.exact:
            return f"exact: the largest exponent span of a row is {self.max_span} of {MAX_EXPONENT}"
        return (
            f"{self.inexact_rows} rows span more than {MAX_EXPONENT} exponents (at most {self.max_span}): "
            f"{self.changed_elements} elements in {self.inexact_groups} groups were rounded"
        )

    @staticmethod
    def total(reports: Iterable[ExponentReport]) -> ExponentReport:
        """Return the sum of `reports`, with the largest span of all."""
        items = list(reports)
        return ExponentReport(
            inexact_rows=sum(item.inexact_rows for item in items),
            inexact_groups=sum(item.inexact_groups for item in items),
            changed_elements=sum(item.changed_elements for item in items),
            nan_rows=sum(item.nan_rows for item in items),
            max_span=max((item.max_span for item in items), default=0),
        )


@dataclass(frozen=True)
class SideTable:
    """What codes, exponents and row scales don't tell about the original bytes; CPU tensors, usually empty.

    Attributes:
        group_index: int64 `[n]`, row * (K / 32) + group of the groups of zeros whose scale code is not base + s.
        group_scales: uint8 `[n]`, their scale codes.
        row_index: int64 `[m]`, the inexact rows and the NaN rows.
        row_codes: uint8 `[m, K / 2]`, their original codes.
        row_scales: uint8 `[m, K / 32]`, their original scale codes.
    """

    group_index: Tensor
    group_scales: Tensor
    row_index: Tensor
    row_codes: Tensor
    row_scales: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors together."""
        tensors = (self.group_index, self.group_scales, self.row_index, self.row_codes, self.row_scales)
        return sum(tensor.nbytes for tensor in tensors)

    @staticmethod
    def concatenate(parts: list[tuple[int, SideTable]]) -> SideTable:
        """Return one table of (first row, table of the rows from there) pairs; at least one."""
        num_groups = parts[0][1].row_scales.shape[1]
        return SideTable(
            group_index=torch.cat([part.group_index + first * num_groups for first, part in parts]),
            group_scales=torch.cat([part.group_scales for _, part in parts]),
            row_index=torch.cat([part.row_index + first for first, part in parts]),
            row_codes=torch.cat([part.row_codes for _, part in parts]),
            row_scales=torch.cat([part.row_scales for _, part in parts]),
        )


@dataclass(frozen=True)
class RelativeExponents:
    """Rows of MXFP4 in the form that the kernels decode.

    Attributes:
        codes: uint8 `[rows, K / 2]`; the tensor that was given, unless a row had to be rounded.
        exponents: uint8 `[rows, K / 32]`, 0..11.
        row_scale: FP32 `[rows]`, a normal power of two, or NaN.
        side: what restores the original bytes.
        report: what was not exact.
        widest_row: the first row of the largest span.
    """

    codes: Tensor
    exponents: Tensor
    row_scale: Tensor
    side: SideTable
    report: ExponentReport
    widest_row: int


def relative_exponents(codes: Tensor, scales: Tensor) -> RelativeExponents:
    """Split the scales of MXFP4 rows into row scales and relative exponents.

    Args:
        codes: uint8 `[rows, K / 2]`, contiguous, 8-byte aligned; rows >= 1, K a positive multiple of 32.
        scales: uint8 `[rows, K / 32]`, UE8M0.
    """
    pairs = codes.view(torch.int64).unflatten(-1, (-1, 2))  # [rows, groups, 2]: 16 codes each
    zero = ((pairs[..., 0] | pairs[..., 1]) & _MAGNITUDES) == 0
    top, bottom = scales.amax(-1).short(), scales.amin(-1).short()
    nan_row = top == _SCALE_NAN
    scale = scales.short()
    some_ignored = bool(zero.any()) or bool(nan_row.any())  # rare, and half of the work
    if some_ignored:
        is_nan = scale == _SCALE_NAN
        ignored = zero | is_nan
        top = scale.masked_fill(ignored, -1).amax(-1)
        bottom = scale.masked_fill(ignored, _SCALE_NAN + 1).amin(-1)
        # a row of zeros may have any base: this one gives back the most of its scale codes without the side table
        all_ignored = top < 0
        top = torch.where(all_ignored, scale.masked_fill(is_nan, 0).amax(-1), top)
        bottom = torch.where(all_ignored | nan_row, top, bottom)
    span = top - bottom
    base = (top - MAX_EXPONENT).clamp_min_(_MIN_BASE)
    relative = scale - base[:, None]
    exponents = relative.clamp(0, MAX_EXPONENT)

    wide = span > MAX_EXPONENT
    kept = wide | nan_row
    rows = kept.nonzero().squeeze(-1)
    groups = rows[:0]
    if some_ignored:  # what s doesn't give back: groups of zeros, all of them
        groups = ((relative != exponents) & ~kept[:, None]).flatten().nonzero().squeeze(-1)
    side = SideTable(
        group_index=groups.cpu(),
        group_scales=scales.flatten()[groups].cpu(),
        row_index=rows.cpu(),
        row_codes=codes[rows].cpu(),
        row_scales=scales[rows].cpu(),
    )

    new_codes, num_wide, num_groups, num_changed = codes, 0, 0, 0
    if rows.numel():
        wide_rows = wide.nonzero().squeeze(-1)
        num_wide = wide_rows.numel()
        if num_wide:
            shift = (-relative[wide_rows]).clamp(0, _MAX_SHIFT).int()
            num_groups = int(((shift > 0) & ~zero[wide_rows]).sum())
            rounded, num_changed = _round_down(codes[wide_rows], shift)
            new_codes = codes.clone()
            new_codes[wide_rows] = rounded

    bits = (base.to(torch.int32) + _SCALE_EXPONENT_OF_BASE_0) << 23
    return RelativeExponents(
        codes=new_codes,
        exponents=exponents.to(torch.uint8),
        row_scale=bits.masked_fill_(nan_row, _FP32_NAN).view(torch.float32),
        side=side,
        report=ExponentReport(
            inexact_rows=num_wide,
            inexact_groups=num_groups,
            changed_elements=num_changed,
            nan_rows=rows.numel() - num_wide,
            max_span=int(span.amax()),
        ),
        widest_row=int(span.argmax()),
    )


def canonical_rows(codes: Tensor, exponents: Tensor, row_scale: Tensor, side: SideTable) -> tuple[Tensor, Tensor]:
    """Return the original (codes, scales), byte for byte: the inverse of `relative_exponents`; writes into `codes`.

    Args:
        codes: uint8 `[rows, K / 2]`, as packed.
        exponents: uint8 `[rows, K / 32]`.
        row_scale: FP32 `[rows]`.
        side: the table of these rows.
    """
    base = (row_scale.view(torch.int32) >> 23) - _SCALE_EXPONENT_OF_BASE_0
    scales = (exponents + base[:, None]).to(torch.uint8)
    device = codes.device
    if side.group_index.numel():
        scales.view(-1)[side.group_index.to(device)] = side.group_scales.to(device)
    if side.row_index.numel():
        rows = side.row_index.to(device)
        codes[rows] = side.row_codes.to(device)
        scales[rows] = side.row_scales.to(device)
    return codes, scales


def _round_down(codes: Tensor, shift: Tensor) -> tuple[Tensor, int]:
    """Return codes of the values times 2^-shift, rounded to nearest even, and the number of values that changed.

    Args:
        codes: uint8 `[rows, K / 2]`.
        shift: int32 `[rows, K / 32]`, 0..5.
    """
    table, changes = _rounding_tables()
    index = (shift.repeat_interleave(GROUP_BYTES, dim=-1) * 256 + codes).flatten()
    new_codes = torch.tensor(table, dtype=torch.uint8, device=codes.device)[index]
    num_changed = int(torch.tensor(changes, device=codes.device)[index].sum())
    return new_codes.view(codes.shape), num_changed


@functools.cache
def _rounding_tables() -> tuple[list[int], list[int]]:
    """Return, at 256 * shift + byte, the byte with both codes rounded and how many of the two values changed."""
    rounded: list[list[int]] = []
    changed: list[list[int]] = []
    for shift in range(_MAX_SHIFT + 1):
        rounded.append([])
        changed.append([])
        for halves in _HALVES:
            value = Fraction(halves, 1 << shift)
            code = min(range(8), key=lambda c: (abs(_HALVES[c] - value), c % 2))  # noqa: B023  (called here)
            rounded[-1].append(code)
            changed[-1].append(int(_HALVES[code] != value))
    table, changes = [], []
    for shift in range(_MAX_SHIFT + 1):
        for byte in range(256):
            low, high = byte & 7, byte >> 4 & 7
            table.append((byte & 0x88) | rounded[shift][low] | rounded[shift][high] << 4)
            changes.append(changed[shift][low] + changed[shift][high])
    return table, changes
