"""The generated WGMMA header is what its generator writes."""

from __future__ import annotations

from megamoe.kernels.codegen_wgmma import BF16_PATH, PATH, generate, generate_bf16


def test_headers_are_up_to_date() -> None:
    assert PATH.read_text() == generate(), "run: python kernels/codegen_wgmma.py"
    assert BF16_PATH.read_text() == generate_bf16(), "run: python kernels/codegen_wgmma.py"
