"""Weight packing: canonical MXFP4 and FP8 block weights in the byte layouts of the Hopper kernels, and back."""

from __future__ import annotations

from megamoe.kernels.packing.decode import simulate_decode
from megamoe.kernels.packing.exponents import MAX_EXPONENT, ExponentReport, SideTable
from megamoe.kernels.packing.fp8 import FP8_LAYOUT, PackedFp8Weight, pack_fp8_block
from megamoe.kernels.packing.packed import PackedWeight, canonical_buffer, pack_mxfp4, pack_mxfp4_experts
from megamoe.kernels.packing.tiles import LAYOUTS, TileLayout, tile_layout

__all__ = [
    "FP8_LAYOUT",
    "LAYOUTS",
    "MAX_EXPONENT",
    "ExponentReport",
    "PackedFp8Weight",
    "PackedWeight",
    "SideTable",
    "TileLayout",
    "canonical_buffer",
    "pack_fp8_block",
    "pack_mxfp4",
    "pack_mxfp4_experts",
    "simulate_decode",
    "tile_layout",
]
