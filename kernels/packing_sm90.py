"""MXFP4 weights in the orders the SM90 mainloops read: `sm90_ss` (through shared memory), `sm90_rs` (registers).

A packed weight is a code stream, 4-bit exponents relative to the row, and one FP32 scale per row:
value = e2m1(code) * 2**(exponent - 5) * row_scale. Relative exponents 0..11 make every product exact in E4M3
(6 * 2**6 = 384 <= 448), so a row whose non-zero groups span at most 11 is exact. A row that spans more has its small
groups rounded to nearest even at exponent 0; it is counted, and its original bytes are kept for `unpack`.
Byte layouts: include/megamoe/mma/policy.cuh.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

LAYOUTS = {"sm90_ss": 1, "sm90_rs": 1}  # id -> version
BLOCK_ROWS = {"sm90_ss": 128, "sm90_rs": 64}
BLOCK_K = 128
MAX_EXPONENT = 11
_EXPONENT_BIAS = 127 - 5  # row_scale = 2 ** (base - 122), base = the scale code that relative exponent 0 stands for


@dataclass
class PackedWeight:
    """One packed matrix per expert.

    Attributes:
        blocks: uint8 [experts, row_blocks, k_blocks, block_bytes].
        row_scales: FP32 [experts, rows]; NaN where a scale code of the row is 255.
        shape: (experts, rows, k) of the canonical weight.
        layout: "sm90_ss" or "sm90_rs".
        version: version of the layout.
        kept_rows: int64 [kept], rows (expert * rows + row) that the packed form cannot give back byte for byte.
        kept_codes: uint8 [kept, k / 2], their canonical codes.
        kept_scales: uint8 [kept, k / 32], their canonical scale codes.
        num_inexact: rows whose values were rounded.
    """

    blocks: torch.Tensor
    row_scales: torch.Tensor
    shape: tuple[int, int, int]
    layout: str
    version: int
    kept_rows: torch.Tensor
    kept_codes: torch.Tensor
    kept_scales: torch.Tensor
    num_inexact: int


def relative_exponents(codes: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Splits scale codes into a row base and relative exponents, rounding what does not fit.

    Args:
        codes: uint8 [rows, k], one E2M1 code each.
        scales: uint8 [rows, k / 32], UE8M0.

    Returns:
        (codes uint8 [rows, k] after rounding, exponents uint8 [rows, k / 32] in 0..11, base int32 [rows]).
    """
    rows, k = codes.shape
    grouped = codes.view(rows, k // 32, 32)
    nonzero = ((grouped & 7) != 0).any(-1)
    scale = scales.int()
    top = torch.where(nonzero & (scale < 255), scale, torch.zeros_like(scale)).amax(1)
    base = (top - MAX_EXPONENT).clamp_min(0)
    relative = scale - base[:, None]
    shift = (-relative).clamp_min(0)
    if bool((nonzero & (shift > 0)).any()):
        magnitude = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64, device=codes.device)
        value = magnitude[(grouped & 7).long()] * torch.exp2(-shift.double())[..., None]
        rounded = _nearest_even_e2m1(value)
        grouped = torch.where((shift > 0)[..., None], rounded | (grouped & 8), grouped)
    return grouped.reshape(rows, k), relative.clamp(0, MAX_EXPONENT).to(torch.uint8), base


def _nearest_even_e2m1(value: torch.Tensor) -> torch.Tensor:
    """Codes (no sign) of the E2M1 magnitudes nearest to `value` >= 0, ties to the even code."""
    code = torch.zeros(value.shape, dtype=torch.uint8, device=value.device)
    for i, middle in enumerate((0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)):
        above = value >= middle if i % 2 else value > middle
        code += above.to(torch.uint8)
    return code


def _weave(codes: torch.Tensor) -> torch.Tensor:
    """[..., 8] codes -> int32 [...]: magnitudes in nibbles, signs 0..3 at bits 8i + 7, 4..7 at 8(i - 4) + 3."""
    word = torch.zeros(codes.shape[:-1], dtype=torch.int64, device=codes.device)
    for i in range(8):
        code = codes[..., i].long()
        word |= ((code & 7) << (4 * i)) | ((code >> 3) << (8 * i + 7 if i < 4 else 8 * (i - 4) + 3))
    return (word - ((word >> 31) << 32)).to(torch.int32)


def _unweave(word: torch.Tensor) -> torch.Tensor:
    """Inverse of `_weave`."""
    wide = word.long() & 0xFFFFFFFF
    codes = [
        ((wide >> (4 * i)) & 7) | (((wide >> (8 * i + 7 if i < 4 else 8 * (i - 4) + 3)) & 1) << 3) for i in range(8)
    ]
    return torch.stack(codes, -1).to(torch.uint8)


def _ss_rows(device: torch.device) -> torch.Tensor:
    """Feature of each row of a 128-row block: the permutation of epilogue/store_rows.cuh."""
    n = torch.arange(128, device=device)
    j, c, b = n // 8, n % 8 // 2, n % 2
    return 32 * (j // 4) + 8 * c + 2 * (j % 4) + b


def _nibbles(exponents: torch.Tensor) -> torch.Tensor:
    """[..., 4] exponents -> uint8 [..., 2], little endian."""
    e = exponents.to(torch.uint8)
    return torch.stack([e[..., 0] | (e[..., 1] << 4), e[..., 2] | (e[..., 3] << 4)], -1)


def _pack_ss(codes: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    rb, kb = codes.shape[0] // 128, codes.shape[1] // 128
    rows = _ss_rows(codes.device)
    words = _weave(codes.view(rb, 128, kb, 4, 4, 8)[:, rows].permute(0, 2, 3, 1, 4, 5))  # block, k, group, row, word
    exps = _nibbles(exponents.view(rb, 128, kb, 4)[:, rows].permute(0, 2, 1, 3))
    return torch.cat([words.contiguous().view(torch.uint8).view(rb, kb, -1), exps.reshape(rb, kb, -1)], -1)


def _unpack_ss(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rb, kb, _ = blocks.shape
    inverse = torch.argsort(_ss_rows(blocks.device))
    words = blocks[..., :8192].contiguous().view(torch.int32).view(rb, kb, 4, 128, 4)
    codes = _unweave(words).permute(0, 3, 1, 2, 4, 5)[:, inverse].reshape(rb * 128, kb * 128)
    e = blocks[..., 8192:].reshape(rb, kb, 128, 2)
    exps = torch.stack([e & 15, e >> 4], -1).reshape(rb, kb, 128, 4).permute(0, 2, 1, 3)[:, inverse]
    return codes, exps.reshape(rb * 128, kb * 4)


def _pack_rs(codes: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    rb, kb = codes.shape[0] // 64, codes.shape[1] // 128
    c = codes.view(rb, 4, 8, 2, kb, 4, 2, 4, 4)  # block, warp, g, row g or g + 8, k, step, half, c, 4
    c = c.permute(0, 4, 5, 1, 2, 7, 3, 6, 8).reshape(rb, kb, 2, 2, 128, 2, 8)  # block, k, step pair, step, thread, row
    words = _weave(c).permute(0, 1, 2, 4, 3, 5).contiguous()
    exps = _nibbles(exponents.view(rb, 64, kb, 4).permute(0, 2, 1, 3))
    return torch.cat([words.view(torch.uint8).view(rb, kb, -1), exps.reshape(rb, kb, -1)], -1)


def _unpack_rs(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rb, kb, _ = blocks.shape
    words = blocks[..., :4096].contiguous().view(torch.int32).view(rb, kb, 2, 128, 2, 2).permute(0, 1, 2, 4, 3, 5)
    c = _unweave(words).reshape(rb, kb, 4, 4, 8, 4, 2, 2, 4)  # block, k, step, warp, g, c, row, half, 4
    codes = c.permute(0, 3, 4, 6, 1, 2, 7, 5, 8).reshape(rb * 64, kb * 128)
    e = blocks[..., 4096:].reshape(rb, kb, 64, 2)
    exps = torch.stack([e & 15, e >> 4], -1).reshape(rb, kb, 64, 4).permute(0, 2, 1, 3)
    return codes, exps.reshape(rb * 64, kb * 4)


_PACK = {"sm90_ss": _pack_ss, "sm90_rs": _pack_rs}
_UNPACK = {"sm90_ss": _unpack_ss, "sm90_rs": _unpack_rs}


def pack_mxfp4(codes: torch.Tensor, scales: torch.Tensor, layout: str, *, strict: bool = False) -> PackedWeight:
    """Packs canonical MXFP4 weights.

    Args:
        codes: uint8 [experts, rows, k / 2], low nibble = even k.
        scales: uint8 [experts, rows, k / 32], UE8M0.
        layout: "sm90_ss" or "sm90_rs".
        strict: refuse weights that the layout cannot hold exactly.

    Returns:
        The packed weight; rows are padded to whole blocks and K to 128 with zeros.

    Raises:
        ValueError: unknown layout, shapes that do not belong together, or inexact rows under `strict`.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout: must be one of {sorted(LAYOUTS)}, got {layout!r}")
    if codes.dim() != 3 or scales.shape != (*codes.shape[:2], codes.shape[2] // 16) or codes.shape[2] % 16:
        raise ValueError(
            f"codes [experts, rows, k / 2] and scales [experts, rows, k / 32] must agree and k be a multiple of 32, "
            f"got {tuple(codes.shape)} and {tuple(scales.shape)}"
        )
    experts, rows, half = codes.shape
    k = 2 * half
    block_rows = BLOCK_ROWS[layout]
    pad_rows, pad_k = -rows % block_rows, -k % BLOCK_K
    blocks, row_scales, kept, inexact = [], [], [], 0
    for e in range(experts):
        wide = torch.stack([codes[e] & 15, codes[e] >> 4], -1).reshape(rows, k)
        rounded, exponents, base = relative_exponents(wide, scales[e])
        nan = (scales[e] == 255).any(1)
        scale = torch.exp2((base - _EXPONENT_BIAS).double()).float()
        row_scales.append(torch.where(nan, torch.full_like(scale, float("nan")), scale))
        changed = (rounded != wide).any(1)
        inexact += int((changed & ~nan).sum())
        lost = changed | nan | (exponents.int() + base[:, None] != scales[e].int()).any(1)
        kept.append(lost.nonzero().flatten() + e * rows)
        padded = torch.nn.functional.pad(rounded, (0, pad_k, 0, pad_rows))
        padded_exponents = torch.nn.functional.pad(exponents, (0, pad_k // 32, 0, pad_rows))
        blocks.append(_PACK[layout](padded, padded_exponents))
    if strict and inexact:
        raise ValueError(
            f"strict: {inexact} of {experts * rows} rows have scale exponents spanning more than {MAX_EXPONENT}, which "
            f"{layout} can only round; pack without strict, or rescale these rows"
        )
    kept_rows = torch.cat(kept)
    return PackedWeight(
        blocks=torch.stack(blocks),
        row_scales=torch.stack(row_scales),
        shape=(experts, rows, k),
        layout=layout,
        version=LAYOUTS[layout],
        kept_rows=kept_rows,
        kept_codes=codes.reshape(experts * rows, half)[kept_rows],
        kept_scales=scales.reshape(experts * rows, k // 32)[kept_rows],
        num_inexact=inexact,
    )


def unpack_mxfp4(packed: PackedWeight) -> tuple[torch.Tensor, torch.Tensor]:
    """Gives the canonical (codes, scales) back, byte for byte.

    Raises:
        ValueError: a layout or version this code does not know.
    """
    if LAYOUTS.get(packed.layout) != packed.version:
        raise ValueError(f"layout: {packed.layout!r} version {packed.version} is not one of {LAYOUTS}")
    experts, rows, k = packed.shape
    codes = torch.empty(experts * rows, k // 2, dtype=torch.uint8, device=packed.blocks.device)
    scales = torch.empty(experts * rows, k // 32, dtype=torch.uint8, device=packed.blocks.device)
    for e in range(experts):
        wide, exponents = _UNPACK[packed.layout](packed.blocks[e])
        pairs = wide[:rows, :k].reshape(rows, k // 2, 2)
        codes[e * rows : (e + 1) * rows] = pairs[..., 0] | (pairs[..., 1] << 4)
        exponent = torch.log2(packed.row_scales[e].nan_to_num(nan=1.0)).int()
        scales[e * rows : (e + 1) * rows] = (
            exponents[:rows, : k // 32].int() + (exponent + _EXPONENT_BIAS)[:, None]
        ).to(torch.uint8)
    codes[packed.kept_rows] = packed.kept_codes
    scales[packed.kept_rows] = packed.kept_scales
    return codes.view(experts, rows, k // 2), scales.view(experts, rows, k // 32)
