"""Number formats: E4M3 with FP32 scales, UE8M0 scales, MXFP4; encoding and decoding in plain PyTorch.

The same bits on every device: no logarithm, no power, no division by a scalar (CUDA turns that into a product with the
reciprocal). Definitions: OCP 8-bit Floating Point Specification 1.0 (E4M3: bias 7, no infinity, NaN is S.1111.111) and
OCP Microscaling Formats Specification 1.0 (E2M1, UE8M0, groups of 32).

Denormals: decoding UE8M0 and MXFP4 and choosing MXFP4 scales work on the bits, so they are exact in every mode. Where
`torch.set_flush_denormal(True)` is in force, FP32 denormals (below 2^-126) among the *values* given to `quantize_*`
count as zero, and `dequantize_e4m3*` returns zero for a result below 2^-126; everything else stays exact.
"""

from __future__ import annotations

import functools
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from megamoe.config_sections import MXFP4_GROUP

__all__ = [
    "AMAX_FLOOR",
    "BLOCK",
    "E2M1_MAX",
    "E4M3_MAX",
    "GRANULARITIES",
    "MXFP4_GROUP",
    "dequantize_e4m3",
    "dequantize_e4m3_weight",
    "dequantize_mxfp4",
    "quantize_e4m3",
    "quantize_e4m3_weight",
    "quantize_mxfp4",
    "ue8m0_decode",
    "ue8m0_encode",
]

E4M3_MAX = 448.0
E2M1_MAX = 6.0
# An amax below this is raised to it, so that the scale is at least 2^-126: a normal FP32 with a finite reciprocal.
AMAX_FLOOR = E4M3_MAX * 2.0**-126
BLOCK = 128  # columns (and rows, for weights) that share one E4M3 scale
GRANULARITIES = ("token", "block128")

_FLT_MAX = torch.finfo(torch.float32).max
_FLOATING = (torch.float32, torch.bfloat16, torch.float16)

# bit patterns of FP32
_ABS = 0x7FFFFFFF
_MANTISSA = 0x7FFFFF
_INF = 0x7F800000
_NAN = 0x7FC00000
_TWO_POW_M127 = 0x400000  # a denormal: the value of UE8M0 code 0
_INT32_MIN = -(1 << 31)  # -0.0

_UE8M0_NAN = 255
# The largest MXFP4 scale that an FP32 amax can ask for is 2^126; 4 and 6 times it exceed FP32, 3 times it doesn't.
_TOP_MXFP4_SCALE = 253
_TOP_MXFP4_MAX = 3.0

# Magnitudes of E2M1 in halves, by code: 0, 0.5, 1, 1.5, 2, 3, 4, 6.
_E2M1_HALVES = (0, 1, 2, 3, 4, 6, 8, 12)
# The code of a magnitude v is the number of these below v. They are the midpoints of neighbours; where the upper
# neighbour has the even code, the midpoint itself must count, so the FP32 just below it stands here.
_ULP_OF_1 = 2.0**-23
_E2M1_STEPS = (0.25, 0.75 - _ULP_OF_1 / 2, 1.25, 1.75 - _ULP_OF_1, 2.5, 3.5 - _ULP_OF_1 * 2, 5.0)

# Work on about 1 MB at a time on a CPU (stays in cache), and on 128 MB elsewhere (bounds the temporaries).
_CPU_GROUPS = 1 << 13
_DEVICE_GROUPS = 1 << 20


# --- E4M3 ---


def quantize_e4m3(x: Tensor, granularity: str) -> tuple[Tensor, Tensor]:
    """Quantise rows to E4M3 with FP32 scales.

    Per group: amax ignoring NaN, clamped to [AMAX_FLOOR, FLT_MAX]; scale = amax / 448; inv = 1 / scale;
    q = E4M3(clamp(x * inv, -448, 448)), nearest even; each operation is one IEEE FP32 operation. NaN becomes the code
    0x7f and spoils no other element; an infinity saturates. A group of zeros has zero codes and the scale 2^-126.

    Args:
        x: `[..., K]`, FP32, BF16 or FP16, any strides, K >= 1.
        granularity: "token" (one scale per row) or "block128" (one per row and 128 columns; the last may be short).

    Returns:
        (q, scale): `[..., K]` float8_e4m3fn contiguous, and FP32 `[...]` or `[..., ceil(K / 128)]`.

    Raises:
        TypeError: a dtype that is not one of the three.
        ValueError: an unknown granularity, or no columns.
    """
    values = _values("x", x, min_dims=1)
    _check_granularity(granularity)
    if granularity == "token":
        scale = _e4m3_scale(_finite_abs(values).amax(-1))
        return _to_e4m3(values * _reciprocal(scale).unsqueeze(-1)), scale
    columns = values.shape[-1]
    blocks = F.pad(values, (0, -columns % BLOCK)).unflatten(-1, (-1, BLOCK))
    scale = _e4m3_scale(_finite_abs(blocks).amax(-1))
    scaled = blocks * _reciprocal(scale).unsqueeze(-1)
    return _to_e4m3(scaled.flatten(-2)[..., :columns]), scale


def dequantize_e4m3(q: Tensor, scale: Tensor, granularity: str) -> Tensor:
    """Return q * scale, `[..., K]` FP32: the inverse of `quantize_e4m3`.

    Args:
        q: `[..., K]` float8_e4m3fn.
        scale: FP32 `[...]` for "token", `[..., ceil(K / 128)]` for "block128".
        granularity: "token" or "block128".

    Raises:
        TypeError: a wrong dtype.
        ValueError: a wrong shape or granularity.
    """
    _check_granularity(granularity)
    _check_dtype("q", q, torch.float8_e4m3fn)
    _check_dtype("scale", scale, torch.float32)
    lead, columns = tuple(q.shape[:-1]), q.shape[-1]
    if granularity == "token":
        _check_shape("scale", scale, lead)
        return q.float() * scale.unsqueeze(-1)
    _check_shape("scale", scale, (*lead, -(-columns // BLOCK)))
    return q.float() * scale.repeat_interleave(BLOCK, dim=-1)[..., :columns]


def quantize_e4m3_weight(w: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise matrices to E4M3 with one FP32 scale per 128x128 block; the rule is that of `quantize_e4m3`.

    Args:
        w: `[..., N, K]`, FP32, BF16 or FP16; the last blocks of either dimension may be short.

    Returns:
        (q, scale): `[..., N, K]` float8_e4m3fn and FP32 `[..., ceil(N / 128), ceil(K / 128)]`.

    Raises:
        TypeError: a dtype that is not one of the three.
        ValueError: fewer than two dimensions, or no columns.
    """
    values = _values("w", w, min_dims=2)
    rows, columns = values.shape[-2:]
    padded = F.pad(values, (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.unflatten(-1, (-1, BLOCK)).unflatten(-3, (-1, BLOCK))  # [..., N blocks, 128, K blocks, 128]
    scale = _e4m3_scale(_finite_abs(blocks).amax((-3, -1)))
    scaled = blocks * _reciprocal(scale)[..., :, None, :, None]
    return _to_e4m3(scaled.flatten(-2).flatten(-3, -2)[..., :rows, :columns]), scale


def dequantize_e4m3_weight(q: Tensor, scale: Tensor) -> Tensor:
    """Return q * scale, `[..., N, K]` FP32: the inverse of `quantize_e4m3_weight`.

    Args:
        q: `[..., N, K]` float8_e4m3fn.
        scale: FP32 `[..., ceil(N / 128), ceil(K / 128)]`.

    Raises:
        TypeError: a wrong dtype.
        ValueError: a wrong shape.
    """
    _check_dtype("q", q, torch.float8_e4m3fn)
    _check_dtype("scale", scale, torch.float32)
    rows, columns = q.shape[-2:]
    _check_shape("scale", scale, (*q.shape[:-2], -(-rows // BLOCK), -(-columns // BLOCK)))
    by_row = scale.repeat_interleave(BLOCK, dim=-2)[..., :rows, :]
    return q.float() * by_row.repeat_interleave(BLOCK, dim=-1)[..., :columns]


# --- UE8M0 ---


def ue8m0_encode(x: Tensor, *, exact: bool = False) -> Tensor:
    """Encode scales as UE8M0, the exponent of a power of two: code c is 2^(c - 127), 255 is NaN.

    Rounds up to a power of two, so that a quotient by the scale never grows. Above 2^127, infinity included, it
    saturates at code 254; 0 and all below 2^-127 give code 0; NaN and negative numbers give 255.

    Args:
        x: any shape, FP32, BF16 or FP16.
        exact: refuse what is not a power of two from 2^-127 to 2^127 (or NaN) instead of rounding.

    Returns:
        uint8 codes of the same shape.

    Raises:
        TypeError: another dtype.
        ValueError: with `exact`, a value that UE8M0 doesn't hold.
    """
    _check_floating("x", x)
    values = x.detach().float()
    bits = values.view(torch.int32)
    magnitude = bits & _ABS
    is_nan = magnitude > _INF
    if exact:
        normal = (bits > 0) & (bits < _INF) & (bits & _MANTISSA == 0)
        wrong = ~(normal | (bits == _TWO_POW_M127) | is_nan)
        if bool(wrong.any()):
            where = wrong.nonzero()[0].tolist()
            value = float(values[tuple(where)])
            raise ValueError(
                f"x: a UE8M0 scale must be a power of two from 2^-127 to 2^127, got {value:.9g} at {where}"
            )
    rounded = ((magnitude.clamp_max(_INF) + _MANTISSA) >> 23).clamp_max(_UE8M0_NAN - 1)
    # 2^-127 is a denormal, so its exponent field says nothing
    codes = torch.where(magnitude <= _TWO_POW_M127, 0, rounded)
    codes = torch.where(is_nan | ((bits < 0) & (bits != _INT32_MIN)), _UE8M0_NAN, codes)
    return codes.to(torch.uint8)


def ue8m0_decode(codes: Tensor) -> Tensor:
    """Return the FP32 values of UE8M0 codes; code 0 is 2^-127 (an FP32 denormal), code 255 is NaN.

    Args:
        codes: uint8, any shape.

    Raises:
        TypeError: another dtype.
    """
    _check_dtype("codes", codes, torch.uint8)
    bits = codes.int() << 23
    bits = torch.where(codes == 0, _TWO_POW_M127, bits)
    return torch.where(codes == _UE8M0_NAN, _NAN, bits).view(torch.float32)


# --- MXFP4 ---


def quantize_mxfp4(w: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise to MXFP4: E2M1 codes with one UE8M0 scale per 32 elements along K.

    The scale is the smallest power of two, from 2^-127, that divides the group's amax to at most 6; elements are
    rounded to the nearest code, ties to even. A group with a NaN has the scale NaN (255) and zero codes. Infinities
    saturate, and no code decodes to an infinity: under the scale 2^126, which only an amax above 1.5 * 2^127 asks for,
    codes stop at 3.

    Args:
        w: `[..., K]`, FP32, BF16 or FP16, any strides, K a multiple of 32.

    Returns:
        (codes, scales): uint8 `[..., K / 2]`, the low nibble of a byte being the even k, and uint8 `[..., K / 32]`.

    Raises:
        TypeError: another dtype.
        ValueError: K is 0 or not a multiple of 32.
    """
    _check_floating("w", w)
    if w.dim() == 0 or w.shape[-1] == 0 or w.shape[-1] % MXFP4_GROUP:
        raise ValueError(f"w: the last dimension must be a positive multiple of {MXFP4_GROUP}, got {list(w.shape)}")
    lead, num_groups = tuple(w.shape[:-1]), w.shape[-1] // MXFP4_GROUP
    groups = w.detach().reshape(-1, MXFP4_GROUP)
    codes = groups.new_empty((groups.shape[0], MXFP4_GROUP // 2), dtype=torch.uint8)
    scales = groups.new_empty(groups.shape[:1], dtype=torch.uint8)
    for part in _parts(groups):
        values = groups[part].float().contiguous()
        bits = values.view(torch.int32)
        amax = (bits & _ABS).amax(-1)  # as integers magnitudes order as they do as floats, and NaN comes last
        is_nan = amax > _INF
        # amax <= 1.5 * 2^n, 6 = 1.5 * 2^2: the sum carries into the exponent exactly when the mantissa exceeds 1.5
        code = (((amax.clamp_max(_INF - 1) + 0x3FFFFF) >> 23) - 2).clamp_min(0)
        inverse = ((254 - code) << 23).view(torch.float32)
        limit = torch.where(code == _TOP_MXFP4_SCALE, _TOP_MXFP4_MAX, E2M1_MAX)
        scaled = torch.minimum(values.abs() * inverse[:, None], limit[:, None])
        nibbles = torch.zeros_like(scaled, dtype=torch.uint8)
        for step in _E2M1_STEPS:  # six times as fast as torch.bucketize
            nibbles += (scaled > step).view(torch.uint8)
        nibbles |= (bits < 0).to(torch.uint8) << 3
        nibbles.masked_fill_(is_nan[:, None], 0)
        codes[part] = nibbles[:, 0::2] | (nibbles[:, 1::2] << 4)
        scales[part] = torch.where(is_nan, _UE8M0_NAN, code).to(torch.uint8)
    return codes.view(*lead, num_groups * (MXFP4_GROUP // 2)), scales.view(*lead, num_groups)


def dequantize_mxfp4(codes: Tensor, scales: Tensor) -> Tensor:
    """Return the FP32 values `[..., K]` of MXFP4 codes, exactly; a value of 2^128 or more is an infinity.

    Args:
        codes: uint8 `[..., K / 2]`, the low nibble of a byte being the even k.
        scales: uint8 `[..., K / 32]`; code 255 makes its group NaN.

    Raises:
        TypeError: another dtype.
        ValueError: shapes that don't fit together.
    """
    _check_dtype("codes", codes, torch.uint8)
    _check_dtype("scales", scales, torch.uint8)
    bytes_per_group = MXFP4_GROUP // 2
    lead, num_bytes = tuple(codes.shape[:-1]), codes.shape[-1]
    if num_bytes % bytes_per_group:
        raise ValueError(f"codes: the last dimension must be a multiple of {bytes_per_group}, got {list(codes.shape)}")
    _check_shape("scales", scales, (*lead, num_bytes // bytes_per_group))
    groups, flat_scales = codes.reshape(-1, bytes_per_group), scales.reshape(-1)
    # an entry is the two values of one byte under one scale, moved as a 64-bit integer: the bits arrive as they are
    table = _mxfp4_table(codes.device)
    values = groups.new_empty((groups.shape[0], bytes_per_group), dtype=torch.int64)
    for part in _parts(groups):
        index = flat_scales[part, None].int() * 256 + groups[part]
        values[part] = table.index_select(0, index.flatten()).view(index.shape)
    return values.view(torch.float32).view(*lead, num_bytes * 2)


@functools.cache
def _mxfp4_table(device: torch.device) -> Tensor:
    """Return the FP32 bits of the low and the high code of byte b under scale s as one int64, at 256 * s + b."""
    table: list[int] = []
    for scale in range(256):
        bits = [_mxfp4_bits(code, scale) for code in range(16)]
        for byte in range(256):
            table += [bits[byte & 15], bits[byte >> 4]]
    with torch.inference_mode(False):  # kept across calls of every mode
        return torch.tensor(table, dtype=torch.int32, device=device).view(torch.int64)


def _mxfp4_bits(code: int, scale: int) -> int:
    """Return the FP32 bits, as a signed 32-bit integer, of an E2M1 code times a UE8M0 scale."""
    halves = _E2M1_HALVES[code & 7]
    sign = _INT32_MIN if code & 8 else 0
    if scale == _UE8M0_NAN:
        return _NAN
    if halves == 0:
        return sign
    # the value is halves * 2^(scale - 128) = 1.x * 2^(top + scale - 128)
    top = halves.bit_length() - 1
    exponent = top + scale - 1
    if exponent >= 255:
        return sign + _INF
    if exponent <= 0:
        return sign + (halves << (scale + 21))  # in units of 2^-149
    return sign + (exponent << 23) + ((halves << (23 - top)) & _MANTISSA)


# --- helpers ---


def _parts(groups: Tensor) -> list[slice]:
    """Return slices that cover the rows of `groups`, each small enough for its temporaries."""
    step = _CPU_GROUPS if groups.device.type == "cpu" else _DEVICE_GROUPS
    return [slice(start, start + step) for start in range(0, groups.shape[0], step)]


def _finite_abs(values: Tensor) -> Tensor:
    """Return |values|, with 0 for NaN."""
    return values.abs().nan_to_num_(nan=0.0, posinf=math.inf)


def _e4m3_scale(amax: Tensor) -> Tensor:
    """Return amax / 448 of the clamped amax, a normal FP32."""
    amax = amax.clamp(AMAX_FLOOR, _FLT_MAX)
    return amax / torch.full_like(amax, E4M3_MAX)  # a tensor: CUDA multiplies by the reciprocal of a scalar


def _reciprocal(scale: Tensor) -> Tensor:
    return torch.ones_like(scale) / scale


def _to_e4m3(scaled: Tensor) -> Tensor:
    """Round to E4M3, nearest even and saturating; every NaN becomes 0x7f."""
    q = scaled.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).contiguous()
    codes = q.view(torch.uint8)
    codes.masked_fill_(codes == 0xFF, 0x7F)
    return q


def _values(name: str, x: Tensor, *, min_dims: int) -> Tensor:
    """Return x in FP32, checked."""
    _check_floating(name, x)
    if x.dim() < min_dims or x.shape[-1] == 0:
        raise ValueError(f"{name}: expected at least {min_dims} dimensions and one column, got {list(x.shape)}")
    return x.detach().float()


def _check_floating(name: str, x: Tensor) -> None:
    if x.dtype not in _FLOATING:
        raise TypeError(f"{name}: expected float32, bfloat16 or float16, got {x.dtype}")


def _check_dtype(name: str, x: Tensor, dtype: torch.dtype) -> None:
    if x.dtype != dtype:
        raise TypeError(f"{name}: expected {dtype}, got {x.dtype}")


def _check_shape(name: str, x: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(x.shape) != shape:
        raise ValueError(f"{name}: expected the shape {list(shape)}, got {list(x.shape)}")


def _check_granularity(granularity: str) -> None:
    if granularity not in GRANULARITIES:
        raise ValueError(f"granularity: must be one of {', '.join(GRANULARITIES)}, got {granularity!r}")
