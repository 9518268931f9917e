"""The generated WGMMA header is what its generator writes."""

from __future__ import annotations

from megamoe.kernels.codegen_wgmma import PATH, generate


def test_header_is_up_to_date() -> None:
    assert PATH.read_text() == generate(), "run: python kernels/codegen_wgmma.py"
