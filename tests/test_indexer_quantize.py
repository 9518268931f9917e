"""The indexer's quantisers: against formats.py and a Hadamard matrix on the CPU, bit for bit the same on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from megamoe.kernels import formats  # noqa: E402
from megamoe.kernels.indexer_quantize import (  # noqa: E402
    hadamard_transform,
    indexer_quantize_sources,
    quantize_indexer,
    write_indexer_cache,
)
from megamoe.kernels.jit import JitSettings, build  # noqa: E402


@pytest.mark.parametrize("source", indexer_quantize_sources(), ids=lambda source: source.name)
def test_compiles_without_spills(source, tmp_path: Path) -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="cuda.core with NVRTC is not installed (megamoe[cuda13])")
    usage = build(source, JitSettings(cache_dirs=(tmp_path,))).usage
    assert usage.is_clean, usage


@pytest.mark.parametrize("dim", [1, 2, 32, 64, 128])
def test_the_transform_is_the_orthonormal_matrix(dim: int) -> None:
    index = torch.arange(dim)
    parity = torch.tensor([[bin(int(i & j)).count("1") % 2 for j in index] for i in index])
    matrix = (1.0 - 2.0 * parity).double() * dim**-0.5
    x = torch.randn(7, dim, dtype=torch.float32)
    got = hadamard_transform(x)
    assert (got.double() - x.double() @ matrix).abs().max() < 1e-5
    assert (hadamard_transform(got) - x).abs().max() < 1e-5


@pytest.mark.parametrize("hadamard", [False, True])
def test_plain_rows_take_the_formats(hadamard: bool) -> None:
    x = torch.randn(3, 5, 64, dtype=torch.bfloat16)
    values = hadamard_transform(x) if hadamard else x
    q, scale = quantize_indexer(x, hadamard=hadamard)
    expected = formats.quantize_e4m3(values, "token")
    assert torch.equal(q.view(torch.uint8), expected[0].view(torch.uint8)) and torch.equal(scale, expected[1])
    codes, words = quantize_indexer(x, "mxfp4", hadamard=hadamard)
    expected = formats.quantize_mxfp4(values)
    assert words.dtype == torch.int32 and words.shape == (3, 5)
    assert torch.equal(codes, expected[0])
    assert torch.equal(words[..., None].view(torch.uint8)[..., :2], expected[1])
    assert not words[..., None].view(torch.uint8)[..., 2:].any()


def test_scales_that_are_powers_of_two() -> None:
    x = torch.randn(50, 128)
    x[3] = 0
    x[4, 7] = 448.0
    _, plain = quantize_indexer(x)
    q, scale = quantize_indexer(x, power_of_two=True)
    assert (torch.frexp(scale).mantissa == 0.5).all() and ((scale >= plain) & (scale < 2 * plain)).all()
    assert scale[4] == 1.0
    assert ((q.float() * scale[:, None] - x).abs() <= x.abs() / 16 + scale[:, None] * 2.0**-10).all()


@pytest.mark.parametrize("format", ["fp8", "mxfp4"])
def test_the_cache_has_values_and_then_scales(format: str) -> None:
    k = torch.randn(9, 128, dtype=torch.bfloat16)
    width = 132 if format == "fp8" else 68
    cache = torch.full((3, 16, 1, width), 0xA5, dtype=torch.uint8)
    slots = torch.tensor([0, 47, -1, 16, 5, 31, -1, 32, 20])
    write_indexer_cache(k, cache, slots, format, hadamard=True)
    values, scales = quantize_indexer(k, format, hadamard=True)
    expected = torch.full((3, 16 * width), 0xA5, dtype=torch.uint8)
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            page, place = divmod(slot, 16)
            at = place * (width - 4)
            expected[page, at : at + width - 4] = values[row].view(torch.uint8)
            at = 16 * (width - 4) + 4 * place
            expected[page, at : at + 4] = scales[row : row + 1].view(torch.uint8)
    assert torch.equal(cache.flatten(1), expected)


X = torch.zeros(4, 128)
CACHE = torch.zeros(2, 16, 1, 132, dtype=torch.uint8)
UNALIGNED = torch.zeros(CACHE.numel() + 1, dtype=torch.uint8)[1:].view_as(CACHE)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: quantize_indexer(X, "fp6"), "format: must be one of fp8, mxfp4"),
        (lambda: quantize_indexer(X[:, :100]), "D one of 32, 64, 96, 128"),
        (lambda: quantize_indexer(X.half()), "bfloat16 or float32"),
        (lambda: quantize_indexer(X[:, :96], hadamard=True), "power of two, got 96"),
        (lambda: quantize_indexer(X, "mxfp4", power_of_two=True), "power_of_two"),
        (lambda: quantize_indexer(X, out=torch.zeros(4, 128)), "out: must be contiguous torch.float8_e4m3fn"),
        (lambda: quantize_indexer(X, out_scale=torch.zeros(3)), "out_scale"),
        (lambda: hadamard_transform(X[:, :96]), "power of two"),
        (lambda: write_indexer_cache(X[None], CACHE, torch.zeros(4).int()), r"k: must be \[num_tokens, D\]"),
        (lambda: write_indexer_cache(X, CACHE[..., :100], torch.zeros(4).int()), r"page, 1, 132\]"),
        (lambda: write_indexer_cache(X, CACHE, torch.zeros(4).int(), "mxfp4"), r"page, 1, 68\]"),
        (lambda: write_indexer_cache(X, CACHE[:, ::2], torch.zeros(4).int()), "pages must be contiguous"),
        (lambda: write_indexer_cache(X, CACHE[:1].expand(2, -1, -1, -1), torch.zeros(4).int()), "pages .* apart"),
        (lambda: write_indexer_cache(X, UNALIGNED, torch.zeros(4).int()), "4-byte aligned"),
        (lambda: write_indexer_cache(X, None, torch.zeros(4).int()), "cache: must be a tensor, got NoneType"),
        (lambda: write_indexer_cache(X, CACHE, [0]), "slots: must be a tensor, got list"),
        (lambda: quantize_indexer(None), "x: must be a tensor, got NoneType"),
        (lambda: write_indexer_cache(X, CACHE, torch.zeros(3).int()), r"slots: must be int64 or int32 \[4\]"),
        (lambda: write_indexer_cache(X, CACHE, torch.full((4,), 32)), "slots: the cache has 32, got slot 32"),
    ],
)
def test_refusals_name_the_rule(call, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()


def strange(rows: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Ordinary rows, then those that quantisers are known to get wrong."""
    x = torch.randn(rows, dim)
    x[1] = 0
    x[2] = -0.0
    for row, value in ((3, 6e-39), (4, 1e-36), (5, 3e38), (6, 2.0**127), (7, 6.0), (8, 1e-44)):
        x[row] *= value / x[row].abs().max()
    x[9, 3], x[10, dim - 1], x[11, 0] = float("nan"), float("inf"), -float("inf")
    x[12] = float("nan")
    x[13] = torch.linspace(-6, 6, dim)
    return x.to(dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("dim", [32, 64, 96, 128])
@pytest.mark.parametrize("how", ["fp8", "fp8 power", "mxfp4"])
@pytest.mark.parametrize("hadamard", [False, True], ids=["plain", "hadamard"])
def test_the_same_bits_on_the_gpu(dim: int, dtype: torch.dtype, how: str, hadamard: bool) -> None:
    if hadamard and dim == 96:
        pytest.skip("the transform is of a power of two")
    format, power = how.split()[0], how.endswith("power")
    x = strange(1037, dim, dtype)
    kwargs = {"hadamard": hadamard, "power_of_two": power}
    expected = quantize_indexer(x, format, **kwargs)
    got = quantize_indexer(x.cuda(), format, **kwargs)
    for e, g in zip(expected, got, strict=True):
        assert torch.equal(e.view(torch.uint8), g.cpu().view(torch.uint8))
    width = expected[0].shape[1] + 4
    slots = torch.randperm(17 * 64)[:1037] - 16  # some are not written
    cpu = torch.full((16, 64, 1, width), 0xA5, dtype=torch.uint8)
    gpu = cpu.cuda()
    slots[slots >= 1024] = -1
    write_indexer_cache(x, cpu, slots, format, **kwargs)
    write_indexer_cache(x.cuda(), gpu, slots.cuda().int(), format, **kwargs)
    assert torch.equal(cpu, gpu.cpu())


@pytest.mark.gpu
def test_strided_rows_and_slots_beyond_the_cache_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    big = torch.randn(40, 3, 200, device="cuda")
    for view in (big[:, :, :128], big[:, 1, 3:131], big[:, :, ::2][..., :64], big[:0, :, :64]):
        for e, g in zip(quantize_indexer(view.cpu()), quantize_indexer(view), strict=True):
            assert torch.equal(e.view(torch.uint8), g.cpu().view(torch.uint8))
    storage = torch.full((4, 16, 1, 132), 0xA5, dtype=torch.uint8, device="cuda")
    slots = torch.full((40,), 32, device="cuda")
    write_indexer_cache(big[:, 0, :128], storage[:2], slots)
    assert bool((storage == 0xA5).all())
    monkeypatch.setenv("MEGAMOE_CHECK", "1")
    with pytest.raises(ValueError, match="the cache has 32"):
        write_indexer_cache(big[:, 0, :128], storage[:2], slots)
