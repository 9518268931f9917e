"""Attention layers with an indexer on the GPU: against the float64 oracle and the CPU, and their peak memory."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from helpers_attention import config_of, parameters_of, truth_of  # noqa: E402
from test_sparse_attention import CUTS, case, dense  # noqa: E402

from megamoe.config import MoEConfig  # noqa: E402
from megamoe.kernels import sparse_attention_sm90  # noqa: E402
from megamoe.kernels.jit.kernel import launched_kernels  # noqa: E402
from megamoe.kernels.sparse_attention import RowCut, sparse_attention  # noqa: E402
from megamoe.launch.attention_check import check_attention  # noqa: E402
from megamoe.layers.attention import make_attention  # noqa: E402

pytestmark = pytest.mark.gpu

HIDDEN = 256
KINDS = ["deepseek_v32", "glm", "gqa", "deepseek_v4"]


def larger(name: str, dtype: str, **indexer: Any) -> MoEConfig:
    """Return a configuration whose sizes the kernels take."""
    sizes = {"kv_lora": 64, "nope_dim": 32, "value_dim": 32} if name in ("deepseek_v32", "glm") else {"head_dim": 48}
    return config_of(
        name,
        attention={"heads": 8, "q_lora": 128, "rope_dim": 16, "page_size": 64, **sizes},
        indexer={"heads": 16, "head_dim": 64, "top_k": 64, **indexer},
        hidden=HIDDEN,
        dtype=dtype,
    )


def tokens(batch: int, length: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(batch, length, HIDDEN, generator=generator)
    return torch.nn.functional.rms_norm(x, (HIDDEN,)).to(dtype).cuda()


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", sorted(CUTS))
def test_sparse_attention(name: str, dtype: torch.dtype, sinks: bool) -> None:
    q, rows, index, cut, sink = case(name, sinks, dtype)
    rows[0] = torch.nan  # what a query without rows must not bring into the result
    index[index == 0] = 1
    leaves = [t.cuda().requires_grad_() for t in (q, rows, sink) if t is not None]
    given = leaves[2] if sinks else None
    out, weights = sparse_attention(leaves[0], leaves[1], index.cuda(), cut, scale=0.4, sinks=given, with_weights=True)
    exact = [t.detach().cpu().double().requires_grad_() for t in leaves]
    expected = dense(exact[0], exact[1], index, cut, 0.4, exact[2] if sinks else None)
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(out.cpu().double(), expected, **tolerance)
    pull = torch.randn(out.shape)
    out.backward(pull.to(out))
    expected.backward(pull.to(dtype).double())
    for leaf, truth in zip(leaves, exact, strict=True):
        assert leaf.grad is not None and truth.grad is not None
        size = truth.grad.abs().max()
        torch.testing.assert_close(leaf.grad.cpu().double() / size, truth.grad / size, **tolerance)
    assert weights is not None and weights.isfinite().all()


def wide_case(
    width: int, heads: int, count: int, sinks: bool, queries: int = 5
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, RowCut, torch.Tensor | None]:
    """Return a problem for the kernel: holes in the lists, a list of nothing, a row twice, NaN where nobody looks."""
    generator = torch.Generator().manual_seed(width + heads + count)
    rows = torch.randn(count + 50, 1, width, generator=generator).bfloat16()
    rows[0] = torch.nan
    index = torch.stack([torch.randperm(count + 49, generator=generator)[:count] + 1 for _ in range(queries)]).int()
    index[0, torch.rand(count, generator=generator) < 0.5] = -1
    index[1, min(count, 3) :] = -1
    index[2] = -1
    if count > 1:
        index[3, 0] = index[3, 1]
    q = torch.randn(queries, heads, width, generator=generator).bfloat16()
    return q, rows, index, RowCut((0, width), (0, 512)), torch.randn(heads, generator=generator) if sinks else None


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("count", [1, 63, 64, 65, 130, 640])
@pytest.mark.parametrize(("width", "heads"), [(576, 64), (576, 128), (512, 64)])
@torch.no_grad()
def test_the_kernel_of_wide_rows(width: int, heads: int, count: int, sinks: bool) -> None:
    q, rows, index, cut, sink = wide_case(width, heads, count, sinks)
    on_gpu = [None if t is None else t.cuda() for t in (q, rows, index, sink)]
    assert sparse_attention_sm90.takes(on_gpu[0], on_gpu[1], cut.key, cut.value)
    out = sparse_attention(*on_gpu[:3], cut, scale=width**-0.5, sinks=on_gpu[3])[0]
    exact = dense(q.double(), rows.double(), index, cut, width**-0.5, None if sink is None else sink.double())
    assert (out[2] == 0).all()
    # weights and the result are rounded to BF16
    error = (out.cpu().double() - exact).norm(dim=-1)
    assert (error <= 6e-3 * exact.norm(dim=-1) + 1e-6).all(), (error / exact.norm(dim=-1)).nan_to_num().max()
    wide = sparse_attention(*on_gpu[:2], on_gpu[2].long(), cut, scale=width**-0.5, sinks=on_gpu[3])[0]
    assert torch.equal(wide, out)
    for _ in range(20):
        assert torch.equal(sparse_attention(*on_gpu[:3], cut, scale=width**-0.5, sinks=on_gpu[3])[0], out)


@torch.no_grad()
def test_the_kernel_beside_the_torch_form() -> None:
    q, rows, index, cut, _ = (
        t.cuda() if isinstance(t, torch.Tensor) else t for t in wide_case(576, 128, 2048, False, 300)
    )
    ours = sparse_attention(q, rows, index, cut, scale=576**-0.5)[0]
    theirs = sparse_attention(q, rows, index, cut, scale=576**-0.5, with_weights=True)[0]
    error = (ours.float() - theirs.float()).norm(dim=-1)
    assert (error <= 6e-3 * theirs.float().norm(dim=-1) + 1e-6).all()


def test_the_kernel_has_the_gradients_of_the_torch_form() -> None:
    grads = []
    for with_weights in (False, True):
        q, rows, index, cut, sink = wide_case(576, 64, 200, True)
        rows[0] = 0
        leaves = [t.cuda().requires_grad_() for t in (q, rows, sink) if t is not None]
        out = sparse_attention(
            leaves[0], leaves[1], index.cuda(), cut, scale=0.04, sinks=leaves[2], with_weights=with_weights
        )
        out[0].float().square().sum().backward()
        grads.append([leaf.grad.float() for leaf in leaves if leaf.grad is not None])
    for a, b in zip(*grads, strict=True):
        assert (a - b).norm() < 1e-2 * b.norm()


@pytest.mark.parametrize("quantization", ["none", "fp8", "mxfp4"])
@pytest.mark.parametrize("name", KINDS)
@torch.no_grad()
def test_prefill_and_decoding_in_bf16(name: str, quantization: str) -> None:
    config = larger(name, "bfloat16", quantization=quantization, hadamard=quantization != "none")
    torch.manual_seed(0)
    layer = make_attention(config, device="cuda").eval()
    x = tokens(3, 300, torch.bfloat16)
    mask = torch.ones(3, 300, device="cuda")
    mask[1, :77] = 0
    x[1, :77] = torch.nan
    out, indices = layer(x, attention_mask=mask, return_indices=True)
    for b, first in enumerate((0, 77, 0)):
        verdict = check_attention(config, layer, x[b, first:], out[b, first:], indices[b, first:])
        assert verdict.failure is None, verdict.failure
    cache = layer.make_cache(3)
    # a prefill, a prefill on top of it, tokens by fours, singly, and three for one sequence alone
    parts = [layer(x[:, :200], attention_mask=mask[:, :200], cache=cache, return_indices=True)]
    parts.append(layer(x[:, 200:250], cache=cache, return_indices=True))
    parts += [layer(x[:, s : s + 4], cache=cache, return_indices=True) for s in range(250, 290, 4)]
    parts += [layer(x[:, s : s + 1], cache=cache, return_indices=True) for s in range(290, 300)]
    again, kept = (torch.cat(pieces, 1) for pieces in zip(*parts, strict=True))
    for b, first in enumerate((0, 77, 0)):
        verdict = check_attention(config, layer, x[b, first:], again[b, first:], kept[b, first:])
        assert verdict.failure is None, verdict.failure
    alone = torch.zeros(3, 3)
    alone[2] = 1
    assert layer(x[:, :3], attention_mask=alone.cuda(), cache=cache)[2].isfinite().all()


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("deepseek_v32", {"kv_lora": 512, "rope_dim": 64, "nope_dim": 32, "value_dim": 32}),
        ("deepseek_v4", {"head_dim": 512, "rope_dim": 64}),
    ],
)
@torch.no_grad()
def test_layers_whose_rows_the_kernel_takes(name: str, sizes: dict[str, int]) -> None:
    config = config_of(
        name,
        attention={"heads": 64, "q_lora": 128, "page_size": 64, **sizes},
        indexer={"heads": 16, "head_dim": 64, "top_k": 64, "quantization": "fp8"},
        hidden=HIDDEN,
        dtype="bfloat16",
    )
    torch.manual_seed(0)
    layer = make_attention(config, device="cuda").eval()
    x = tokens(2, 150, torch.bfloat16)
    cache = layer.make_cache(2)
    parts = [layer(x[:, :140], cache=cache, return_indices=True)]
    parts += [layer(x[:, s : s + 1], cache=cache, return_indices=True) for s in range(140, 150)]
    out, kept = (torch.cat(pieces, 1) for pieces in zip(*parts, strict=True))
    (source,) = sparse_attention_sm90.sparse_attention_sources(width=576 if name == "deepseek_v32" else 512)
    assert source.name in launched_kernels
    for b in range(2):
        verdict = check_attention(config, layer, x[b], out[b], kept[b])
        assert verdict.failure is None, verdict.failure


@pytest.mark.parametrize("name", KINDS)
def test_fp32_and_gradients(name: str) -> None:
    config = larger(name, "float32")
    torch.manual_seed(0)
    layer = make_attention(config, device="cuda").eval()
    x = tokens(1, 150, torch.float32).requires_grad_()
    out, indices = layer(x, return_indices=True)
    twin = copy.deepcopy(layer).cpu()
    y = x.detach().cpu().requires_grad_()
    expected = twin(y, topk_indices=indices.cpu())
    verdict = check_attention(config, layer, x[0].detach(), out[0].detach(), indices[0])
    assert verdict.failure is None, verdict.failure
    pull = torch.randn(out.shape)
    out.backward(pull.cuda())
    expected.backward(pull)
    assert x.grad is not None and y.grad is not None
    torch.testing.assert_close(x.grad.cpu(), y.grad, rtol=1e-3, atol=1e-4)
    for (key, ours), (_, theirs) in zip(layer.named_parameters(), twin.named_parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None) == ("indexer" in key), key
        if ours.grad is not None and theirs.grad is not None:
            torch.testing.assert_close(ours.grad.cpu(), theirs.grad, rtol=1e-3, atol=2e-3, msg=key)


@torch.no_grad()
def test_the_wrong_rope_style_is_seen() -> None:
    config = larger("deepseek_v32", "float32")
    layer = make_attention(config, device="cuda").eval()
    x = tokens(1, 128, torch.float32)
    wrong = larger("deepseek_v32", "float32", rope="interleaved")
    out, indices = layer(x, return_indices=True)
    assert check_attention(wrong, layer, x[0], out[0], indices[0]).failure is not None
    truth = truth_of(config, parameters_of(layer.cpu()), x[0].cpu())
    torch.testing.assert_close(out[0].cpu().double(), truth.out, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", KINDS)
@torch.no_grad()
def test_prefill_holds_nothing_of_queries_times_keys(name: str) -> None:
    """FP32 scores of 32768 x 32768 are 4 GiB; V4's entries are a quarter as many: 1 GiB."""
    config = larger(name, "bfloat16", quantization="fp8", max_logits_mib=32)
    layer = make_attention(config, device="cuda").eval()
    x = tokens(1, 32768, torch.bfloat16)
    layer(x[:, :256])
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    layer(x)
    peak = torch.cuda.max_memory_allocated() - before
    assert peak < 600 << 20, f"{peak / 2**20:.0f} MiB"


@torch.no_grad()
def test_same_bits_in_every_run() -> None:
    config = larger("deepseek_v32", "bfloat16", quantization="fp8", hadamard=True)
    layer = make_attention(config, device="cuda").eval()
    x = tokens(4, 700, torch.bfloat16)
    first = layer(x, return_indices=True)
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(layer(x, return_indices=True), first, strict=True))
