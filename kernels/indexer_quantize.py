"""Quantisers of the lightning indexer: queries and keys to E4M3 or MXFP4, plain or into a paged cache.

One kernel does it all on CUDA tensors (`impls/sm90_indexer_quantize.cuh`); on CPU tensors torch gives the same bits.

A row of D values, after the optional Hadamard transform, becomes
    fp8    D bytes E4M3 and an FP32 scale: the rule of `formats.quantize_e4m3`, one scale a row
    mxfp4  D / 2 bytes of E2M1 codes and a word of 4 bytes, one UE8M0 scale for each 32 values, the rest 0:
           the rule of `formats.quantize_mxfp4`
A page of the cache holds the values of its rows, then their scales: `[num_pages, page, 1, D + 4]` or
`[num_pages, page, 1, D / 2 + 4]` bytes, the layout that DeepGEMM's paged functions read.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from itertools import product

import torch
from torch import Tensor

from megamoe import env
from megamoe.kernels import formats
from megamoe.kernels.jit import KernelSource
from megamoe.kernels.mqa_checks import check_tensors
from megamoe.kernels.packed_launch import launch_packed

__all__ = ["hadamard_transform", "indexer_quantize_sources", "quantize_indexer", "write_indexer_cache"]

_DIMS = (32, 64, 96, 128)
_FORMATS = ("fp8", "mxfp4")
_VALUES = {torch.float32: "float", torch.bfloat16: "uint16_t"}
_THREADS = 256
_SCALE_BYTES = 4
_ARGS = struct.Struct("<4Q3q2ifi")  # IndexerQuantizeArgs of impls/sm90_indexer_quantize.cuh


@lru_cache
def _source(dtype: torch.dtype, dim: int, format: str, arch: str = "sm_90a") -> KernelSource:
    name = f"indexer_quantize_{'fp32' if dtype == torch.float32 else 'bf16'}_d{dim}_{format}"
    code = f"""#include "megamoe/impls/sm90_indexer_quantize.cuh"
extern "C" __global__ void __launch_bounds__({_THREADS})
{name}(const __grid_constant__ megamoe::impls::IndexerQuantizeArgs args) {{
    constexpr int kDim = {dim};
    constexpr bool kFp4 = {str(format == "mxfp4").lower()};
    static_assert(sizeof(args) == {_ARGS.size}, "what the host packs");
    megamoe::impls::sm90_indexer_quantize<{_VALUES[dtype]}, kDim, kFp4>(args);
}}
"""
    return KernelSource(name=name, code=code, entry=name, arch=arch)


def indexer_quantize_sources(arch: str = "sm_90a", *, dim: int | None = None) -> list[KernelSource]:
    """Return every instance that the quantisers can launch, for rows of `dim` values if it is given."""
    dims = _DIMS if dim is None else tuple(d for d in _DIMS if d == dim)
    return [_source(*parameters, arch) for parameters in product(_VALUES, dims, _FORMATS)]


def hadamard_transform(x: Tensor) -> Tensor:
    """Return x times the Sylvester-Hadamard matrix of its last dimension, divided by its root: an orthonormal rotation.

    log2(D) stages of sums and differences in FP32, nearest partners first, then one product with D^-0.5: each one IEEE
    operation, so that the kernel's bits are the same. Rows with elements beyond FLT_MAX / D may overflow.

    Args:
        x: `[..., D]`, FP32, BF16 or FP16, D a power of two.

    Returns:
        FP32 of the same shape.

    Raises:
        ValueError: D is not a power of two.
    """
    check_tensors(x=x)
    dim = x.shape[-1] if x.dim() else 0
    if dim < 1 or dim & (dim - 1):
        raise ValueError(
            f"x: the last dimension must be a power of two for the Hadamard transform, got {list(x.shape)}"
        )
    values = x.float()
    distance = 1
    while distance < dim:
        low, high = values.unflatten(-1, (-1, 2, distance)).unbind(-2)
        values = torch.stack((low + high, low - high), -2).flatten(-3)
        distance *= 2
    return values * _hadamard_scale(dim)


@lru_cache
def _hadamard_scale(dim: int) -> float:
    return float(torch.tensor(dim**-0.5, dtype=torch.float32))


def quantize_indexer(
    x: Tensor,
    format: str = "fp8",
    *,
    hadamard: bool = False,
    power_of_two: bool = False,
    out: Tensor | None = None,
    out_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Quantise queries or keys of the indexer.

    Args:
        x: `[..., D]`, BF16 or FP32 with unit stride along D; D is 32, 64, 96 or 128.
        format: "fp8" or "mxfp4".
        hadamard: rotate each row first; D must be a power of two.
        power_of_two: round fp8 scales up to powers of two; mxfp4 scales are such anyway.
        out: contiguous, float8_e4m3fn `[..., D]` or uint8 `[..., D / 2]`, or None.
        out_scale: contiguous, FP32 `[...]`, or int32 `[...]` for mxfp4, or None.

    Returns:
        (values, scales) as `out` and `out_scale`. The scale of a query belongs into its head's weight; byte i of an
        mxfp4 word is the UE8M0 scale of values 32 * i to 32 * i + 31.

    Raises:
        ValueError: a shape, dtype or stride outside the above.
    """
    lead, dim = _check_rows("x", x, format, hadamard, power_of_two)
    value_dtype, columns = (torch.float8_e4m3fn, dim) if format == "fp8" else (torch.uint8, dim // 2)
    scale_dtype = torch.float32 if format == "fp8" else torch.int32
    values = _output("out", out, (*lead, columns), value_dtype, x.device)
    scales = _output("out_scale", out_scale, lead, scale_dtype, x.device)
    rows = x.reshape(-1, dim)
    if rows.shape[0] == 0:
        return values, scales
    if x.is_cuda:
        count = rows.shape[0]
        _launch(rows, format, hadamard, power_of_two, values.data_ptr(), scales.data_ptr(), None, 0, count, count)
        return values, scales
    found_values, found_scales = _quantize_by_torch(rows, format, hadamard, power_of_two)
    values.view(torch.uint8).view(-1, columns).copy_(found_values)
    scales.view(-1).view(torch.uint8).view(-1, _SCALE_BYTES).copy_(found_scales)
    return values, scales


def write_indexer_cache(
    k: Tensor,
    cache: Tensor,
    slots: Tensor,
    format: str = "fp8",
    *,
    hadamard: bool = False,
    power_of_two: bool = False,
) -> None:
    """Quantise keys into the pages of a cache.

    Args:
        k: `[num_tokens, D]`, as x of `quantize_indexer`.
        cache: uint8 `[num_pages, page, 1, D + 4]`, or `[num_pages, page, 1, D / 2 + 4]` for mxfp4; each page is
            contiguous.
        slots: int64 or int32 `[num_tokens]`: page number * page + place in it. Keys of a slot below 0 are not written;
            neither are keys beyond the cache, which are an error on a CPU and in checked mode (MEGAMOE_CHECK=1). Two
            keys of one slot leave either.
        format, hadamard, power_of_two: as of `quantize_indexer`.

    Raises:
        ValueError: a shape, dtype or stride outside the above, or a slot beyond the cache.
    """
    lead, dim = _check_rows("k", k, format, hadamard, power_of_two)
    if len(lead) != 1:
        raise ValueError(f"k: must be [num_tokens, D], got {list(k.shape)}")
    check_tensors(cache=cache, slots=slots)
    value_bytes = dim if format == "fp8" else dim // 2
    width = value_bytes + _SCALE_BYTES
    if cache.dim() != 4 or cache.dtype != torch.uint8 or tuple(cache.shape[2:]) != (1, width):
        raise ValueError(
            f"cache: must be uint8 [num_pages, page, 1, {width}] for {format} rows of {dim}, "
            f"got {cache.dtype} {list(cache.shape)}"
        )
    num_pages, page = cache.shape[:2]
    apart = num_pages < 2 or cache.stride(0) >= page * width
    aligned = cache.stride(0) % 4 == 0 and cache.data_ptr() % 4 == 0
    if cache.device != k.device or cache.stride()[1:] != (width, width, 1) or not apart or not aligned:
        raise ValueError(
            f"cache: pages must be contiguous, apart, 4-byte aligned and on {k.device}, "
            f"got strides {cache.stride()} at {cache.data_ptr():#x} on {cache.device}"
        )
    if slots.shape != lead or slots.dtype not in (torch.int64, torch.int32) or slots.device != k.device:
        raise ValueError(
            f"slots: must be int64 or int32 [{lead[0]}] on {k.device}, got {slots.dtype} {list(slots.shape)} "
            f"on {slots.device}"
        )
    if lead[0] == 0:
        return
    slots = slots.long().contiguous()
    num_slots = num_pages * page
    if not k.is_cuda or env.flag("MEGAMOE_CHECK"):
        last = int(slots.max())
        if last >= num_slots:
            raise ValueError(f"slots: the cache has {num_slots}, got slot {last}")
    if k.is_cuda:
        at = cache.data_ptr()
        scales = at + page * value_bytes
        _launch(k, format, hadamard, power_of_two, at, scales, slots, cache.stride(0), page, num_slots)
        return
    values, scales_of_rows = _quantize_by_torch(k, format, hadamard, power_of_two)
    wanted = slots >= 0
    pages, places = slots[wanted] // page, slots[wanted] % page
    flat = (
        cache.view(num_pages, page * width)
        if cache.is_contiguous()
        else cache.as_strided((num_pages, page * width), (cache.stride(0), 1))
    )
    flat[:, : page * value_bytes].unflatten(1, (page, value_bytes))[pages, places] = values[wanted]
    flat[:, page * value_bytes :].unflatten(1, (page, _SCALE_BYTES))[pages, places] = scales_of_rows[wanted]


def _check_rows(name: str, x: Tensor, format: str, hadamard: bool, power_of_two: bool) -> tuple[tuple[int, ...], int]:
    """Return the leading dimensions and D."""
    if format not in _FORMATS:
        raise ValueError(f"format: must be one of {', '.join(_FORMATS)}, got {format!r}")
    check_tensors(**{name: x})
    if x.dim() == 0 or x.shape[-1] not in _DIMS or x.dtype not in _VALUES:
        raise ValueError(
            f"{name}: must be bfloat16 or float32 [..., D] with D one of {', '.join(map(str, _DIMS))}, "
            f"got {x.dtype} {list(x.shape)}"
        )
    dim = x.shape[-1]
    if hadamard and dim & (dim - 1):
        raise ValueError(f"hadamard: needs D to be a power of two, got {dim}")
    if power_of_two and format == "mxfp4":
        raise ValueError("power_of_two: is of fp8 scales; mxfp4 scales are powers of two without it")
    return tuple(x.shape[:-1]), dim


def _output(name: str, out: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if out is None:
        return torch.empty(shape, dtype=dtype, device=device)
    check_tensors(**{name: out})
    if tuple(out.shape) != shape or out.dtype != dtype or out.device != device or not out.is_contiguous():
        raise ValueError(
            f"{name}: must be contiguous {dtype} {list(shape)} on {device}, got {out.dtype} {list(out.shape)} "
            f"with strides {out.stride()} on {out.device}"
        )
    return out


def _quantize_by_torch(rows: Tensor, format: str, hadamard: bool, power_of_two: bool) -> tuple[Tensor, Tensor]:
    """Return the bytes of the values `[rows, D or D / 2]` and of the scales `[rows, 4]`."""
    values = hadamard_transform(rows) if hadamard else rows.float()
    if format == "mxfp4":
        codes, exponents = formats.quantize_mxfp4(values)
        words = exponents.new_zeros((rows.shape[0], _SCALE_BYTES))
        words[:, : exponents.shape[1]] = exponents
        return codes, words
    q, scale = formats.quantize_e4m3(values, "token")
    if power_of_two:
        scale = formats.ue8m0_decode(formats.ue8m0_encode(scale))
        q = (values * (1.0 / scale)[:, None]).clamp(-formats.E4M3_MAX, formats.E4M3_MAX).to(torch.float8_e4m3fn)
        codes = q.view(torch.uint8)
        codes.masked_fill_(codes == 0xFF, 0x7F)
    return q.view(torch.uint8), scale[:, None].contiguous().view(torch.uint8)


def _launch(
    rows: Tensor,
    format: str,
    hadamard: bool,
    power_of_two: bool,
    values: int,
    scales: int,
    slots: Tensor | None,
    page_bytes: int,
    page: int,
    num_slots: int,
) -> None:
    count, dim = rows.shape
    aligned = 4 * rows.element_size()
    if rows.stride(1) != 1 or rows.stride(0) % 4 or rows.data_ptr() % aligned:
        rows = rows.contiguous() if rows.stride(1) != 1 or rows.stride(0) % 4 else rows.clone()
    lanes = 32 if dim == 96 else dim // 4
    launch_packed(
        ("indexer_quantize", rows.dtype, dim, format), lambda: _source(rows.dtype, dim, format), rows.device.index,
        -(-count * lanes // _THREADS), _THREADS, _ARGS,
        (
            *(rows.data_ptr(), values, scales, 0 if slots is None else slots.data_ptr()),
            *(rows.stride(0), page_bytes, num_slots, count, page),
            *(_hadamard_scale(dim) if hadamard else 0.0, int(power_of_two)),
        ),
    )  # fmt: skip
