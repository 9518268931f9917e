"""The quantiser kernel: it compiles without spills here, and equals `formats.quantize_e4m3` bit for bit on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from megamoe.kernels import formats  # noqa: E402
from megamoe.kernels.jit import JitSettings, build  # noqa: E402
from megamoe.kernels.quantize import quantize_e4m3, quantize_sources  # noqa: E402


@pytest.mark.parametrize("source", quantize_sources(), ids=lambda s: s.name)
def test_compiles_without_spills(source, tmp_path: Path) -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="cuda.core with NVRTC is not installed (megamoe[cuda13])")
    usage = build(source, JitSettings(cache_dirs=(tmp_path,))).usage
    assert usage.is_clean, usage


@pytest.mark.parametrize("granularity", ["token", "block128"])
def test_cpu_takes_the_formats(granularity: str) -> None:
    x = torch.randn(5, 320, dtype=torch.bfloat16)
    values, scales = quantize_e4m3(x, granularity)
    expected = formats.quantize_e4m3(x, granularity)
    assert torch.equal(values.view(torch.uint8), expected[0].view(torch.uint8)) and torch.equal(scales, expected[1])


@pytest.mark.parametrize(
    ("shape", "granularity", "words"),
    [((4, 8), "row", "granularity"), ((4,), "token", "num_tokens, columns")],
)
def test_refusals_name_the_rule(shape: tuple[int, ...], granularity: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        quantize_e4m3(torch.zeros(shape, dtype=torch.bfloat16), granularity)


def strange_rows(columns: int) -> torch.Tensor:
    """Rows that quantisers are known to get wrong, after a few ordinary ones."""
    x = torch.randn(16, columns, dtype=torch.float32)
    x[3] = 0
    for row, value in ((4, 6.3e-38), (5, 1e-36), (6, 1.4e-36), (7, 3e38)):
        x[row] *= value / x[row].abs().max()
    x = x.bfloat16()
    x[8, columns // 2] = float("nan")
    x[9, 0] = float("inf")
    x[10, columns - 1] = float("-inf")
    return x


@pytest.mark.gpu
@pytest.mark.parametrize("granularity", ["token", "block128"])
@pytest.mark.parametrize("columns", [8, 128, 320, 2880, 4096, 7168, 16384])
def test_bit_equal_on_the_gpu(columns: int, granularity: str) -> None:
    x = torch.cat([strange_rows(columns), torch.randn(1000, columns).bfloat16()])
    expected = formats.quantize_e4m3(x, granularity)
    out = torch.full(x.shape, float("nan"), device="cuda").to(torch.float8_e4m3fn)
    scale = torch.full(expected[1].shape, float("nan"), device="cuda")
    quantize_e4m3(x.cuda(), granularity, out=out, out_scale=scale)
    assert torch.equal(scale.cpu().view(torch.int32), expected[1].view(torch.int32))
    assert torch.equal(out.cpu().view(torch.uint8), expected[0].view(torch.uint8))


@pytest.mark.gpu
def test_strides_and_empty_on_the_gpu() -> None:
    big = torch.randn(64, 2 * 256, device="cuda").bfloat16()
    for view in (big[:, ::2], big[:, 1:257], big[:, :256], big.t()[:256, :64], big[:0, :256]):
        values, scales = quantize_e4m3(view, "token")
        expected = formats.quantize_e4m3(view.cpu().contiguous(), "token")
        assert torch.equal(values.cpu().view(torch.uint8), expected[0].view(torch.uint8))
        assert torch.equal(scales.cpu(), expected[1])
    with pytest.raises(ValueError, match="multiple of 8"):
        quantize_e4m3(big[:, :100], "token")
