"""The device's decoding of packed MXFP4, emulated thread by thread on the packed bytes; for tests and checks.

Nothing here looks at canonical codes or shares code with the packer: addresses are computed as the mainloops compute
them (`mma/ss_mainloop.cuh`, `mma/rs_mainloop.cuh`), bytes come from the byte-permute table of `mma/decode_fp4.cuh`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megamoe.kernels.packing.packed import PackedWeight

__all__ = ["decode_words", "simulate_decode"]

_WORD = 0xFFFFFFFF


def decode_words(words: Tensor, exponents: Tensor) -> tuple[Tensor, Tensor]:
    """Return the E4M3 bytes of woven words: the first and the second register, int64 holding 32 bits.

    Args:
        words: int64, 8 codes in 32 bits.
        exponents: int64 of a shape that broadcasts to that of words, 0..15 (12..15 overflow, as on the device).
    """
    low = (0x14100800 + exponents * 0x08080800) & _WORD
    high = (0x24201C18 + exponents * 0x08080808) & _WORD
    magnitudes = words & 0x77777777
    first = _byte_permute(low, high, magnitudes) | (words & 0x80808080)
    second = _byte_permute(low, high, magnitudes >> 16) | ((words << 4) & 0x80808080)
    return first, second


def simulate_decode(packed: PackedWeight) -> Tensor:
    """Return the FP32 weights `[E, N, K]` that a kernel multiplies with: decoded E4M3 times the row scale.

    Args:
        packed: on any device.

    Raises:
        ValueError: a layout that is not known.
    """
    decoders = {
        "sm90_ss": (128, _decode_ss_block_row),
        "sm90_rs": (64, _decode_rs_block_row),
        "sm90_moe": (128, _decode_moe_block_row),
    }
    if packed.layout not in decoders:
        raise ValueError(f"layout: must be one of {', '.join(decoders)}, got {packed.layout!r}")
    block_rows, decode = decoders[packed.layout]
    values = packed.row_scale.new_empty(packed.shape)
    for expert in range(packed.num_experts):
        for row_block in range(packed.data.shape[1]):
            first = row_block * block_rows
            rows = min(block_rows, packed.rows - first)
            decoded = decode(packed.data[expert, row_block].long())[:rows, : packed.columns]
            scale = packed.row_scale[expert, first : first + rows]
            values[expert, first : first + rows] = decoded * scale[:, None]
    return values


def _byte_permute(low: Tensor, high: Tensor, selectors: Tensor) -> Tensor:
    """Emulate `__byte_perm` where no selector asks for sign replication."""
    result = torch.zeros_like(selectors)
    for i in range(4):
        selector = (selectors >> (4 * i)) & 7
        word = torch.where(selector >= 4, high, low)
        result |= ((word >> (8 * (selector & 3))) & 0xFF) << (8 * i)
    return result


def _load(block: Tensor, address: Tensor, num_bytes: int) -> Tensor:
    """Return the little-endian integers of `num_bytes` at `address` in every block `[k blocks, block bytes]`."""
    value = torch.zeros((block.shape[0], *address.shape), dtype=torch.int64, device=block.device)
    for i in range(num_bytes):
        value |= block[:, address + i] << (8 * i)
    return value


def _e4m3(registers: Tensor) -> Tensor:
    """Return the 4 values of each register, in a new last dimension."""
    codes = torch.stack([(registers >> (8 * i)) & 0xFF for i in range(4)], dim=-1)
    return codes.to(torch.uint8).view(torch.float8_e4m3fn).float()


def _decode_ss_block_row(block: Tensor) -> Tensor:
    """Return the values `[128, K]` of one row of blocks, int64 bytes `[k blocks, 8448]`, in the order of features."""
    num_k = block.shape[0]
    thread = torch.arange(128, device=block.device)  # a decoding thread owns one row of shared memory
    exponents = _load(block, 8192 + thread * 2, 2)
    shared = torch.empty((128, num_k, 128), device=block.device)
    for group in range(4):
        for i in range(4):
            word = _load(block, group * 2048 + thread * 16 + 4 * i, 4)
            first, second = decode_words(word, (exponents >> (4 * group)) & 15)
            k = 32 * group + 8 * i
            shared[:, :, k : k + 4] = _e4m3(first).transpose(0, 1)
            shared[:, :, k + 4 : k + 8] = _e4m3(second).transpose(0, 1)
    return _as_features(shared)


def _decode_moe_block_row(block: Tensor) -> Tensor:
    """Return the values `[128, K]` of one row of blocks, int64 bytes `[k blocks, 8448]`, in the order of features."""
    num_k = block.shape[0]
    place = torch.arange(128, device=block.device)  # a decoding thread owns one place, and writes the row it belongs to
    exponents = _load(block, 8192 + place * 2, 2)
    shared = torch.empty((128, num_k, 128), device=block.device)
    row = place ^ (place // 8 % 2)
    for group in range(4):
        for i in range(4):
            word = _load(block, group * 2048 + place * 16 + 4 * i, 4)
            for half, register in enumerate(decode_words(word, (exponents >> (4 * group)) & 15)):
                k = 32 * group + 16 * half + 4 * i
                shared[row, :, k : k + 4] = _e4m3(register).transpose(0, 1)
    return _as_features(shared)


def _as_features(shared: Tensor) -> Tensor:
    """Return rows of a tile in shared memory, `[128, k blocks, 128]`, as `[128 features, K]`."""
    features = torch.empty((128, shared.shape[1] * 128), device=shared.device)
    for column in range(128):  # accumulator column 8j + 2c + b goes to the feature that the epilogue stores
        j, c, b = column // 8, column % 8 // 2, column % 2
        features[32 * (j // 4) + 8 * c + 2 * (j % 4) + b] = shared[column].flatten()
    return features


def _decode_rs_block_row(block: Tensor) -> Tensor:
    """Return the values `[64, K]` of one row of blocks, int64 bytes `[k blocks, 4224]`, in the order of features."""
    num_k = block.shape[0]
    thread = torch.arange(128, device=block.device)
    warp, lane = thread // 32, thread % 32
    g, c = lane // 4, lane % 4
    exponents = _load(block, 4096 + (thread // 4) * 4, 4)
    features = torch.empty((64, num_k, 128), device=block.device)
    for group in range(4):
        for upper in range(2):
            word = _load(block, (group // 2) * 2048 + thread * 16 + 4 * (2 * (group % 2) + upper), 4)
            registers = decode_words(word, (exponents >> (16 * upper + 4 * group)) & 15)
            # accumulator rows g and g + 8 of a warp are its features 2g and 2g + 1
            feature = 16 * warp + 2 * g + upper
            for half, register in enumerate(registers):
                values = _e4m3(register)
                for byte in range(4):
                    # wgmma operand A: 4 neighbouring k per register, the second register 16 further
                    features[feature, :, 32 * group + 16 * half + 4 * c + byte] = values[:, :, byte].transpose(0, 1)
    return features.flatten(1)
