"""Top-k on the GPU: the set that the CPU finds, whatever the rows hold, and the same bits in every run."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from helpers_topk import strange_rows  # noqa: E402

from megamoe.kernels.topk import topk_indices  # noqa: E402

pytestmark = pytest.mark.gpu

POISON = -77


def check(
    x: torch.Tensor, k: int, starts: torch.Tensor | None = None, ends: torch.Tensor | None = None, **more: object
) -> None:
    """Both orders choose the columns that the CPU chooses; `x` is on the GPU, windows on the CPU."""
    expected = topk_indices(x.cpu(), k, starts, ends, deterministic=True)
    on_gpu = [None if v is None else v.cuda() for v in (starts, ends)]
    for deterministic in (False, True):
        out = torch.full((x.shape[0], k + 2), POISON, dtype=torch.int32, device="cuda")
        found = topk_indices(x, k, *on_gpu, deterministic=deterministic, out=out[:, 1:-1])
        assert (out[:, 0] == POISON).all() and (out[:, -1] == POISON).all()
        found = found.cpu()
        count = (expected >= 0).sum(1)
        assert torch.equal((found >= 0).sum(1), count)
        assert torch.equal(found < 0, torch.arange(k) >= count[:, None]), "-1 comes last"
        if not deterministic:
            found = torch.where(found < 0, 2**31 - 1, found).sort(dim=1).values
            found = torch.where(found == 2**31 - 1, -1, found)
        wrong = (found != expected).any(1).nonzero().flatten().tolist()
        assert not wrong, f"{deterministic=} rows {wrong[:8]}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("columns", [1, 3, 2048, 6145, 8192, 32768, 65541, 131072])
def test_strange_rows(columns: int, dtype: torch.dtype) -> None:
    x = strange_rows(columns).to(dtype).cuda()
    for k in (1, 512, 2048):
        check(x, k)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_windows(dtype: torch.dtype) -> None:
    columns = 33001  # rows begin at every alignment
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(140, columns, generator=generator).to(dtype)
    starts = torch.randint(-5, columns, (140,), generator=generator, dtype=torch.int32)
    ends = torch.randint(-5, columns + 9, (140,), generator=generator, dtype=torch.int32)
    starts[:4] = torch.tensor([0, 7, columns, 11])
    ends[:4] = torch.tensor([columns + 5, 7, columns, 3])
    check(x.cuda(), 2048, starts, ends)
    lengths = torch.arange(140, dtype=torch.int32) * 300
    check(x.cuda(), 2048, None, lengths)
    # few and long enough for blocks to share a row
    wide = torch.cat([x[:10], x[10:20], x[20:30]], dim=1)
    check(wide.cuda(), 2048, starts[:10], ends[:10] * 3)


def test_the_ends_of_int32_are_windows_like_others() -> None:
    low, high = -(2**31), 2**31 - 1
    x = torch.randn(5, 70001, device="cuda")
    starts = torch.tensor([low, 20000, high, high, 5], dtype=torch.int32)
    ends = torch.tensor([high, low, low, high, low + 4], dtype=torch.int32)
    for columns in (9000, 70001):
        check(x[:, :columns], 100, starts, ends)


def test_rows_with_a_stride_and_shifts() -> None:
    big = torch.randn(200, 20011, device="cuda")
    check(big[:, 13:-5], 2048)
    check(big[::3, 2:18000], 100)
    check(big.t()[:9000, :150].t(), 300)
    shifts = torch.arange(200, dtype=torch.int32, device="cuda") * 1000
    found = topk_indices(big, 7, None, shifts, shifts=-shifts, deterministic=True)
    expected = topk_indices(big.cpu(), 7, None, shifts.cpu(), shifts=-shifts.cpu(), deterministic=True)
    assert torch.equal(found.cpu(), expected) and bool((found[0] == -1).all())


@pytest.mark.parametrize("rows", [1, 3, 18])
def test_rows_of_a_million(rows: int) -> None:
    columns = 1 << 20
    torch.manual_seed(1)
    x = torch.randn(rows, columns, device="cuda")
    x[0, 100:] = x[0, 100:].relu()
    if rows > 2:
        x[1] = 4.0
        x[2, : columns - 3000] = -torch.inf
        x[2, columns - 3000 :] = x[2, columns - 3000 :].sort().values
    for k in (2048, 64):
        check(x, k)


def test_random_rows_of_many_kinds() -> None:
    torch.manual_seed(5)
    for columns in (6200, 16384, 50001):
        x = torch.randn(600, columns, device="cuda")
        scale = torch.rand(600, 1, device="cuda") * 40 - 20
        check((x * scale.exp2()).to(torch.bfloat16), 2048)
        check(x.exp() * scale, 1024)
        smooth = torch.nn.functional.avg_pool1d(x[:, None], 33, 1, 16)[:, 0]  # neighbours are alike
        check(smooth, 2048)


@pytest.mark.parametrize(("rows", "columns"), [(8, 131072), (600, 32768)])
def test_the_same_bits_every_run(rows: int, columns: int) -> None:
    x = torch.randn(rows, columns, device="cuda").mul(64).round()
    first = topk_indices(x, 2048, deterministic=True)
    for _ in range(20):
        assert torch.equal(topk_indices(x, 2048, deterministic=True), first)


def test_captured_in_a_graph() -> None:
    x = torch.randn(64, 32768, device="cuda")
    out = torch.empty(64, 2048, dtype=torch.int32, device="cuda")
    topk_indices(x, 2048, deterministic=True, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        topk_indices(x, 2048, deterministic=True, out=out)
    x.copy_(torch.randn(64, 32768, device="cuda"))
    out.fill_(POISON)
    graph.replay()
    assert torch.equal(out.cpu(), topk_indices(x.cpu(), 2048, deterministic=True))
