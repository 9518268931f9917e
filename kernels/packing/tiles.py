"""Byte layouts of packed MXFP4 weights, as the Hopper kernels read them.

A weight `[N, K]` is cut into blocks of 64 or 128 rows by 128 of K; block (row block, k block) lies at
(row block * num_k_blocks + k block) * block_bytes. N and K are padded to whole blocks with zero codes. A block holds
its codes first, in words of 8 codes (32 bits), then its relative exponents, 4 bits per group of 32 along K, the lowest
group in the lowest bits, 16 bits a row. All little endian. r below is the row's place in the block: rows are stored in
another order than they have as features (`ss_row_order`, `rs_row_order`, `moe_row_order`), which makes epilogue stores
wide.

| layout | block | codes | exponents |
|---|---|---|---|
| `sm90_ss` | 128 x 128, 8448 bytes | `[group 4][r 128][word 4]` | `[r 128]` |
| `sm90_rs` | 64 x 128, 4224 bytes | `[group / 2][warp 4][g 8][c 4][group % 2][upper 2]` | `[warp 4][g 8][upper 2]` |
| `sm90_moe` | 128 x 128, 8448 bytes | `[group 4][r 128][word 4]` | `[r 128]` |

`sm90_ss`: word w holds k = 32 group + 8w + 0..7. `sm90_rs`: a word is what one thread (lane 4g + c of a warp) feeds to
one pair of wgmma registers: r = 16 warp + 8 upper + g, k = 32 group + 4c + 0..3 and 32 group + 16 + 4c + 0..3.
`sm90_moe`: both mainloops read it; word w holds k = 32 group + 4w + 0..3 and 32 group + 16 + 4w + 0..3.

A word is woven: bits 0..2 of nibble i are the magnitude of code i, ready as a byte-permute selector; the sign of code
i < 4 is bit 8i + 7 and that of code i >= 4 is bit 8(i - 4) + 3, so that each sign is at most one shift of the whole
word away from the top of its byte.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megamoe.kernels.formats import MXFP4_GROUP

__all__ = ["BLOCK_K", "LAYOUTS", "TileLayout", "moe_row_order", "rs_row_order", "ss_row_order", "tile_layout"]

BLOCK_K = 128
_ROW_CODE_BYTES = BLOCK_K // 2  # of one row of a block
_ROW_EXPONENT_BYTES = BLOCK_K // MXFP4_GROUP // 2


def ss_row_order() -> list[int]:
    """Return the feature (row of W within a block) that `sm90_ss` stores at each of its 128 places.

    A thread holds the accumulator columns 8j + 2c + b, with c its lane % 4; this order makes them, for four j, eight
    neighbouring features.
    """
    return [32 * (r // 32) + 8 * (r % 8 // 2) + 2 * (r // 8 % 4) + r % 2 for r in range(128)]


def rs_row_order() -> list[int]:
    """Return the feature that `sm90_rs` stores at each of its 64 places.

    A thread holds the accumulator rows g and g + 8 of its warp's 16; this order makes them neighbouring features.
    """
    return [16 * (r // 16) + 2 * (r % 8) + r % 16 // 8 for r in range(64)]


def moe_row_order() -> list[int]:
    """Return the feature that `sm90_moe` stores at each of its 128 places.

    Row n of the multiplied tile has the order of `ss_row_order`, and lies at place n ^ (n / 8 % 2): so the rows 2g and
    2g + 1 of a strip of 16, which a thread of the register mainloop reads, lie in different banks for the g of a warp.
    """
    order = ss_row_order()
    return [order[r ^ (r // 8 % 2)] for r in range(128)]


@dataclass(frozen=True)
class TileLayout:
    """One byte layout: a permutation of the codes and of the exponents of a block, and the weaving of words.

    Attributes:
        name, version: the id that a packed weight carries; the version rises with every change of the bytes.
        block_rows: rows of a block.
        unit: an integer dtype as wide as the runs of canonical codes that stay together.
        unit_order: for each unit of a packed block, which unit it is of the canonical `[block_rows, 128 of K]`.
        exponent_order: for each 16 bits of exponents of a packed block, which row they belong to.
    """

    name: str
    version: int
    block_rows: int
    unit: torch.dtype
    unit_order: tuple[int, ...]
    exponent_order: tuple[int, ...]

    @property
    def code_bytes(self) -> int:
        """Bytes of codes in a block."""
        return self.block_rows * _ROW_CODE_BYTES

    @property
    def block_bytes(self) -> int:
        """Bytes of a block: 4 bits a code and 4 bits a group."""
        return self.code_bytes + self.block_rows * _ROW_EXPONENT_BYTES

    def grid(self, rows: int, columns: int) -> tuple[int, int]:
        """Return (row blocks, k blocks) of a weight `[rows, columns]`."""
        return -(-rows // self.block_rows), -(-columns // BLOCK_K)

    def nbytes(self, rows: int, columns: int) -> int:
        """Return the bytes of a packed weight `[rows, columns]`."""
        row_blocks, k_blocks = self.grid(rows, columns)
        return row_blocks * k_blocks * self.block_bytes

    def write(self, codes: Tensor, exponents: Tensor, blocks: Tensor) -> None:
        """Write rows into blocks.

        Args:
            codes: uint8 `[rows, K / 2]`.
            exponents: uint8 `[rows, K / 32]`, 0..11.
            blocks: uint8 `[row blocks, k blocks, block_bytes]`; overwritten.
        """
        row_blocks, k_blocks = blocks.shape[:2]
        units = self._to_blocks(codes, row_blocks, k_blocks, _ROW_CODE_BYTES).view(self.unit)
        words = _weave(_permuted(units, self.unit_order).view(torch.int32))
        pairs = F.pad(exponents, (0, exponents.shape[1] % 2)).unflatten(-1, (-1, 2))
        nibbles = pairs[..., 0] | (pairs[..., 1] << 4)
        nibbles = self._to_blocks(nibbles, row_blocks, k_blocks, _ROW_EXPONENT_BYTES).view(torch.int16)
        nibbles = _permuted(nibbles, self.exponent_order)
        blocks[..., : self.code_bytes] = words.view(torch.uint8).unflatten(0, (row_blocks, k_blocks))
        blocks[..., self.code_bytes :] = nibbles.view(torch.uint8).unflatten(0, (row_blocks, k_blocks))

    def read(self, blocks: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor]:
        """Return (codes, exponents) of blocks, without the padding: the inverse of `write`.

        Args:
            blocks: uint8 `[row blocks, k blocks, block_bytes]`.
            rows, columns: of the weight that they hold.
        """
        row_blocks = blocks.shape[0]
        flat = blocks.flatten(0, 1)
        words = flat[:, : self.code_bytes].clone(memory_format=torch.contiguous_format).view(torch.int32)
        units = _permuted(_unweave(words).view(self.unit), _inverse(self.unit_order))
        codes = self._to_rows(units, row_blocks, _ROW_CODE_BYTES)
        nibbles = flat[:, self.code_bytes :].contiguous().view(torch.int16)
        nibbles = _permuted(nibbles, _inverse(self.exponent_order))
        nibbles = self._to_rows(nibbles, row_blocks, _ROW_EXPONENT_BYTES)
        exponents = torch.stack((nibbles & 15, nibbles >> 4), dim=-1).flatten(-2)
        return codes[:rows, : columns // 2], exponents[:rows, : columns // MXFP4_GROUP]

    def _to_blocks(self, x: Tensor, row_blocks: int, k_blocks: int, row_bytes: int) -> Tensor:
        """Return uint8 rows as contiguous `[blocks, block_rows * row_bytes]`, padded with zeros."""
        rows, columns = row_blocks * self.block_rows, k_blocks * row_bytes
        if tuple(x.shape) != (rows, columns):
            x = F.pad(x, (0, columns - x.shape[1], 0, rows - x.shape[0]))
        parts = x.reshape(row_blocks, self.block_rows, k_blocks, row_bytes)
        return parts.transpose(1, 2).contiguous().view(row_blocks * k_blocks, -1)

    def _to_rows(self, x: Tensor, row_blocks: int, row_bytes: int) -> Tensor:
        """Undo `_to_blocks`, but for the padding; x has any dtype."""
        parts = x.view(torch.uint8).view(row_blocks, -1, self.block_rows, row_bytes)
        return parts.transpose(1, 2).reshape(row_blocks * self.block_rows, -1)


def _ss_layout() -> TileLayout:
    order = ss_row_order()
    units_per_row, units_per_group = 8, 2
    unit_order = [
        order[r] * units_per_row + group * units_per_group + unit
        for group, r, unit in itertools.product(range(4), range(128), range(units_per_group))
    ]
    return TileLayout("sm90_ss", 1, 128, torch.int64, tuple(unit_order), tuple(order))


def _rs_layout() -> TileLayout:
    order = rs_row_order()
    units_per_row, units_per_group, units_per_half = 32, 8, 4
    dims = [range(n) for n in (2, 4, 8, 4, 2, 2, 2)]
    unit_order = [
        order[16 * warp + 8 * upper + g] * units_per_row
        + (2 * group_pair + group) * units_per_group
        + half * units_per_half
        + c
        for group_pair, warp, g, c, group, upper, half in itertools.product(*dims)
    ]
    lanes = itertools.product(range(4), range(8), range(2))
    exponent_order = [order[16 * warp + 8 * upper + g] for warp, g, upper in lanes]
    return TileLayout("sm90_rs", 1, 64, torch.int16, tuple(unit_order), tuple(exponent_order))


def _moe_layout() -> TileLayout:
    order = moe_row_order()
    units_per_row, units_per_group, units_per_half = 32, 8, 4
    dims = [range(n) for n in (4, 128, 4, 2)]
    unit_order = [
        order[r] * units_per_row + group * units_per_group + half * units_per_half + word
        for group, r, word, half in itertools.product(*dims)
    ]
    return TileLayout("sm90_moe", 1, 128, torch.int16, tuple(unit_order), tuple(order))


LAYOUTS = {layout.name: layout for layout in (_ss_layout(), _rs_layout(), _moe_layout())}


def tile_layout(name: str) -> TileLayout:
    """Return the layout of that name.

    Raises:
        ValueError: no such layout.
    """
    if name not in LAYOUTS:
        raise ValueError(f"layout: must be one of {', '.join(LAYOUTS)}, got {name!r}")
    return LAYOUTS[name]


def _permuted(blocks: Tensor, order: tuple[int, ...]) -> Tensor:
    """Return `blocks[:, order]`; on a CPU gather does it twice as fast as indexing."""
    return blocks.gather(1, _index(order, blocks.device).expand(blocks.shape[0], -1))


@functools.lru_cache(maxsize=64)
def _index(order: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(order, device=device)


@functools.cache
def _inverse(order: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(range(len(order)), key=order.__getitem__))


def _signed(bits: int) -> int:
    """Return 32 bits as the signed integer that torch takes."""
    return bits - (1 << 32) if bits >> 31 else bits


_SIGNS = _signed(0x88888888)
_ALL_BUT_SIGNS = 0x77777777
_LOW_HALF = 0xFFFF
# (distance in bits, bits below): a perfect shuffle of the nibbles of two exchanged halves
_MIDDLE_BYTES = (8, 0x0000FF00)
_MIDDLE_NIBBLES = (4, 0x00F000F0)


def _weave(words: Tensor) -> Tensor:
    """Move the sign of code i < 4 to nibble 2i + 1 and of code i >= 4 to nibble 2(i - 4), in place; int32 words."""
    signs = words & _SIGNS
    scratch = torch.empty_like(signs)
    _exchange_halves(signs, scratch)
    _exchange(signs, scratch, *_MIDDLE_BYTES)
    _exchange(signs, scratch, *_MIDDLE_NIBBLES)
    return words.bitwise_and_(_ALL_BUT_SIGNS).bitwise_or_(signs)


def _unweave(words: Tensor) -> Tensor:
    """Undo `_weave`, in place: its steps, each its own inverse, in the opposite order."""
    signs = words & _SIGNS
    scratch = torch.empty_like(signs)
    _exchange(signs, scratch, *_MIDDLE_NIBBLES)
    _exchange(signs, scratch, *_MIDDLE_BYTES)
    _exchange_halves(signs, scratch)
    return words.bitwise_and_(_ALL_BUT_SIGNS).bitwise_or_(signs)


def _exchange_halves(x: Tensor, scratch: Tensor) -> None:
    torch.bitwise_right_shift(x, 16, out=scratch)
    scratch.bitwise_and_(_LOW_HALF)
    x.bitwise_left_shift_(16).bitwise_or_(scratch)


def _exchange(x: Tensor, scratch: Tensor, distance: int, below: int) -> None:
    """Exchange the bits `below` with those `distance` higher."""
    torch.bitwise_right_shift(x, distance, out=scratch)
    scratch.bitwise_xor_(x).bitwise_and_(below)
    x.bitwise_xor_(scratch)
    x.bitwise_xor_(scratch.bitwise_left_shift_(distance))
