"""MQA logits in plain torch: what the kernels are compared with, and what runs on tensors that are on no Hopper GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from megamoe.kernels import formats

__all__ = ["SPLIT_KEYS", "dequantize_fp4", "paged_keys", "paged_metadata", "write_logits"]

SPLIT_KEYS = 256  # kMqaSplit of impls/mqa_logits_metadata.cuh
_MAX_SCORES = 1 << 24


@torch.no_grad()  # as the kernels, which have no gradient and to which autocast is nothing
@torch.autocast("cpu", enabled=False)
def write_logits(
    out: Tensor,
    q: Tensor,
    keys: Tensor,
    weights: Tensor,
    starts: Tensor,
    lengths: Tensor,
    *,
    compressed: bool,
    clean: bool,
    factors: Tensor | None = None,
) -> None:
    """Write the logits of each row's window, sum over heads of max(q . key, 0) * weight, times the key's factor.

    Args:
        out: FP32 or BF16 `[rows, columns]`; other columns become -inf, or stay as they are.
        q: `[rows, heads, head_dim]`, FP32 or FP64; it decides the precision.
        keys: `[num_keys, head_dim]`, as q.
        weights: `[rows, heads]`.
        starts, lengths: of the windows, `[rows]`, within the keys.
        compressed: column 0 is the window's first key; otherwise key 0.
        clean: whether the other columns become -inf.
        factors: `[num_keys]`; None is 1.
    """
    rows, heads, _ = q.shape
    num_keys, columns = keys.shape[0], out.shape[1]
    step = max(1, _MAX_SCORES // max(1, heads * num_keys))
    at = torch.arange(num_keys, device=out.device)
    for first in range(0, rows, step):
        part = slice(first, first + step)
        scores = torch.einsum("rhd,kd->rhk", q[part], keys).relu_()
        logits = torch.einsum("rhk,rh->rk", scores, weights[part].to(q.dtype))
        if factors is not None:
            logits = logits * factors.to(q.dtype)
        begin, count = starts[part, None].long(), lengths[part, None].long()
        inside = (at >= begin) & (at < begin + count)
        column = at - begin if compressed else at.expand_as(inside)
        inside &= column < columns
        row, key = inside.nonzero(as_tuple=True)
        target = out[part]
        if clean:
            target.fill_(float("-inf"))
        target[row, column[row, key]] = logits[row, key].to(out.dtype)


def dequantize_fp4(codes: Tensor, scales: Tensor, head_dim: int) -> Tensor:
    """Return MXFP4 rows as FP32.

    Args:
        codes: uint8 `[..., head_dim / 2]`, low nibble first.
        scales: int32 `[...]`, one UE8M0 code a byte for 32 of head_dim, lowest byte first.
        head_dim: of a row.
    """
    exponents = scales.unsqueeze(-1).contiguous().view(torch.uint8)[..., : head_dim // 32]
    return formats.dequantize_mxfp4(codes, exponents.contiguous())


def paged_keys(cache: Tensor, pages: Tensor, value_bytes: int) -> tuple[Tensor, Tensor]:
    """Return the values, uint8 `[num_keys, value_bytes]`, and the 4-byte words `[num_keys]` (int32) of some pages.

    Args:
        cache: uint8 `[num_pages, page, 1, value_bytes + 4]`: a page has the values of its keys, then a word for each.
        pages: indices of pages; one that names no page reads as zeros.
        value_bytes: of a key.
    """
    num_pages, page = cache.shape[:2]
    flat = torch.as_strided(cache, (num_pages, page * (value_bytes + 4)), (cache.stride(0), 1))
    known = (pages >= 0) & (pages < num_pages)
    chosen = flat[torch.where(known, pages, 0).long()] * known[:, None].to(torch.uint8)
    values = chosen[:, : page * value_bytes].reshape(-1, value_bytes)
    return values, chosen[:, page * value_bytes :].contiguous().view(torch.int32).reshape(-1)


def paged_metadata(context_lens: Tensor, num_shares: int) -> Tensor:
    """Return where each share of the work begins: int32 `[num_shares + 1, 2]`, batch and split of 256 keys.

    Args:
        context_lens: int32 `[batches]` or `[batches, next_n]`; the longest of a batch counts.
        num_shares: shares of equal size; those without work begin behind the last batch.
    """
    longest = (context_lens if context_lens.dim() == 2 else context_lens[:, None]).clamp(min=0).long()
    counts = longest.amax(dim=1).add(SPLIT_KEYS - 1) // SPLIT_KEYS
    behind = counts.cumsum(0)
    total = int(behind[-1]) if behind.numel() else 0
    out = torch.zeros((num_shares + 1, 2), dtype=torch.int32, device=context_lens.device)
    out[:, 0] = context_lens.shape[0]
    if total:
        first = torch.arange(num_shares, device=out.device) * total // num_shares
        batch = torch.searchsorted(behind, first, right=True)
        out[:-1, 0] = batch.int()
        out[:-1, 1] = (first - (behind - counts)[batch]).int()
    return out
