"""Rotary embeddings against products of complex numbers, plain and stretched."""

from __future__ import annotations

import math

import pytest
import torch

from megamoe.kernels.rope import apply_rope, rope_frequencies, rope_tables, yarn_logit_scale
from megamoe.testing.attention_oracle import rotate

PLAIN = {"rope_theta": 10000.0, "yarn_factor": 1.0, "yarn_context": 4096, "yarn_fast": 32.0, "yarn_slow": 1.0}


@pytest.mark.parametrize("style", ["half", "interleaved"])
@pytest.mark.parametrize("changes", [{}, {"yarn_factor": 40.0}, {"yarn_factor": 16.0, "yarn_context": 65536,
                                                                "rope_theta": 160000.0}])  # fmt: skip
@pytest.mark.parametrize("shape", [(64,), (3, 64)])
def test_against_complex_numbers(style: str, changes: dict[str, float], shape: tuple[int, ...]) -> None:
    options = {**PLAIN, **changes}
    frequencies = rope_frequencies(
        64, options["rope_theta"], **{name: options[name] for name in options if name != "rope_theta"}
    )
    positions = torch.tensor([0, 1, 77, 4095, 163839])
    x = torch.randn(5, *shape)
    cos, sin = rope_tables(positions, frequencies)
    for inverse in (False, True):
        turned = apply_rope(x, cos, sin, style, inverse=inverse)
        # the frequencies are FP32: 2^-25 of 163839 radians
        truth = rotate(x.double(), positions, style, options, inverse=inverse)
        torch.testing.assert_close(turned.double(), truth, rtol=0, atol=2e-2)
        torch.testing.assert_close(turned[:3].double(), truth[:3], rtol=0, atol=2e-5)
    back = apply_rope(apply_rope(x, cos, sin, style), cos, sin, style, inverse=True)
    torch.testing.assert_close(back, x, rtol=1e-5, atol=1e-5)
    assert apply_rope(x.bfloat16(), cos, sin, style).dtype == torch.bfloat16


def test_yarn_leaves_fast_pairs_and_divides_slow_ones() -> None:
    plain, stretched = rope_frequencies(64, 10000.0), rope_frequencies(64, 10000.0, yarn_factor=40.0)
    turns = plain * 4096 / (2 * math.pi)
    assert torch.equal(stretched[turns > 40], plain[turns > 40])
    torch.testing.assert_close(stretched[turns < 0.8], plain[turns < 0.8] / 40)
    between = (stretched < plain * 0.999) & (stretched > plain / 39.9)
    assert between.any() and (stretched.diff() < 0).all()
    assert yarn_logit_scale(40.0, 1.0) == pytest.approx(1.36888**2, abs=1e-4) and yarn_logit_scale(1.0, 1.0) == 1


def test_an_unknown_style_is_refused() -> None:
    with pytest.raises(ValueError, match="style: expected half or interleaved, got 'neox'"):
        apply_rope(torch.zeros(1, 4), torch.zeros(1, 2), torch.zeros(1, 2), "neox")
