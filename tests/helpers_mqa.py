"""MQA logits from their definition, in FP64 and without the package's kernels, and problems to compare on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from megamoe.kernels import formats, mqa_logits

E4M3 = torch.float8_e4m3fn
POISON = 1234.5


def oracle(q: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return FP64 logits `[rows, num_keys]` of q `[rows, heads, head_dim]` and keys `[num_keys, head_dim]`."""
    q, keys, weights = q.double(), keys.double(), weights.double()
    out = torch.zeros(q.shape[0], keys.shape[0], dtype=torch.float64, device=q.device)
    for head in range(q.shape[1]):
        out += (q[:, head] @ keys.t()).clamp(min=0) * weights[:, head, None]
    return out


def windowed(
    logits: torch.Tensor, starts: list[int], ends: list[int], columns: int, compressed: bool, clean: bool
) -> torch.Tensor:
    """Return what a call leaves in an output that was full of POISON."""
    out = torch.full((logits.shape[0], columns), float("-inf") if clean else POISON, dtype=torch.float64)
    for row, (start, end) in enumerate(zip(starts, ends, strict=True)):
        start, end = max(start, 0), min(end, logits.shape[1])
        count = max(end - start, 0)
        if compressed:
            count = min(count, columns)
            out[row, :count] = logits[row, start : start + count]
        elif count:
            out[row, start:end] = logits[row, start:end]
    return out.to(logits.device)


def random_windows(rows: int, num_keys: int, seed: int = 0) -> tuple[list[int], list[int]]:
    """Return windows of all kinds: inside, empty, reversed, beyond both ends."""
    generator = torch.Generator().manual_seed(seed)
    ends = torch.randint(-4, num_keys + 5, (2, rows), generator=generator)
    starts, stops = ends[0].tolist(), ends[1].tolist()
    for row in range(0, rows, 5):
        starts[row], stops[row] = 0, num_keys
    for row in range(3, rows, 5):
        stops[row] = starts[row]
    return starts, stops


@dataclass
class Dense:
    """Operands over neighbouring keys, and what they stand for.

    Attributes:
        call: of (weights, start, end, ...) with q and kv bound.
        q, kv: as the functions take them.
        exact_q, exact_keys: dequantised.
        weights: `[rows, heads]`.
    """

    call: Callable[..., torch.Tensor]
    q: Any
    kv: Any
    exact_q: torch.Tensor
    exact_keys: torch.Tensor
    weights: torch.Tensor


def quantized_keys(num_keys: int, head_dim: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return E4M3 keys and their FP32 scales."""
    return formats.quantize_e4m3(torch.randn(num_keys, head_dim, device=device) * 2, "token")


def dense_problem(rows: int, heads: int, head_dim: int, num_keys: int, fp4: bool, device: str = "cpu") -> Dense:
    """Return random operands; the global generator of torch decides them."""
    weights = torch.randn(rows, heads, device=device)
    values = torch.randn(rows, heads, head_dim, device=device)
    if fp4:
        codes, scales = formats.quantize_mxfp4(values)
        key_codes, key_scales = formats.quantize_mxfp4(torch.randn(num_keys, head_dim, device=device))
        q, kv = (codes, scales), (key_codes, key_scales)
        exact = formats.dequantize_mxfp4(codes, scales), formats.dequantize_mxfp4(key_codes, key_scales)
        return Dense(lambda *a, **k: mqa_logits.fp8_fp4_mqa_logits(q, kv, *a, **k), q, kv, *exact, weights)
    q8, kv8 = values.to(E4M3), quantized_keys(num_keys, head_dim, device)
    exact_keys = kv8[0].float() * kv8[1][:, None]
    return Dense(lambda *a, **k: mqa_logits.fp8_mqa_logits(q8, kv8, *a, **k), q8, kv8, q8.float(), exact_keys, weights)


@dataclass
class Paged:
    """Operands over a paged cache; keys of a batch that its table has no page for are zeros.

    Attributes:
        call: of (context_lens, max_context_len, ...) with everything else bound.
        arguments: q, cache, weights, block table.
        exact_q: dequantised `[batches, next_n, heads, head_dim]`.
        exact_keys: dequantised keys of each batch, in order.
        weights: `[batches * next_n, heads]`.
        lengths: keys of each batch.
    """

    call: Callable[..., torch.Tensor]
    arguments: tuple[Any, ...]
    exact_q: torch.Tensor
    exact_keys: list[torch.Tensor]
    weights: torch.Tensor
    lengths: list[int]

    def expected(self, counts: list[int], columns: int, clean: bool) -> torch.Tensor:
        """Return what a call leaves in an output full of POISON; counts: keys that each row sees."""
        next_n = self.exact_q.shape[1]
        parts = []
        for batch, keys in enumerate(self.exact_keys):
            rows = slice(batch * next_n, (batch + 1) * next_n)
            logits = oracle(self.exact_q[batch], keys, self.weights[rows])
            ends = [min(count, columns) for count in counts[rows]]
            parts.append(windowed(logits, [0] * next_n, ends, columns, False, clean))
        return torch.cat(parts)


def paged_problem(
    lengths: list[int], next_n: int, heads: int, head_dim: int, page: int, fp4: bool, device: str = "cpu", gap: int = 0
) -> Paged:
    """Return random operands; pages lie in a random order, `gap` bytes apart; the table ends in names of no page."""
    batches = len(lengths)
    num_blocks = [-(-length // page) for length in lengths]
    num_pages = sum(num_blocks) + 1
    value_bytes = head_dim // 2 if fp4 else head_dim
    page_bytes = page * (value_bytes + 4)
    storage = torch.full((num_pages, page_bytes + gap), 0x7F, dtype=torch.uint8, device=device)
    exact = torch.empty(num_pages, page, head_dim, device=device)
    if fp4:
        codes, scales = formats.quantize_mxfp4(torch.randn(num_pages * page, head_dim, device=device))
        words = torch.zeros(num_pages * page, 4, dtype=torch.uint8, device=device)
        words[:, : head_dim // 32] = scales
        exact[:] = formats.dequantize_mxfp4(codes, scales).view_as(exact)
        values = codes.view(num_pages, -1)
    else:
        e4m3, fp32 = quantized_keys(num_pages * page, head_dim, device)
        exact[:] = (e4m3.float() * fp32[:, None]).view_as(exact)
        values, words = e4m3.view(torch.uint8).view(num_pages, -1), fp32.view(torch.uint8)
    storage[:, : page * value_bytes] = values
    storage[:, page * value_bytes : page_bytes] = words.view(num_pages, -1)
    cache = torch.as_strided(
        storage, (num_pages, page, 1, value_bytes + 4), (page_bytes + gap, value_bytes + 4, value_bytes + 4, 1)
    )
    table = torch.full((batches, max([1, *num_blocks])), 2**31 - 1, dtype=torch.int32)
    order = torch.randperm(num_pages).int()
    keys, at = [], 0
    for batch, count in enumerate(num_blocks):
        mine = order[at : at + count]
        at += count
        table[batch, :count] = mine
        keys.append(exact[mine.to(device).long()].reshape(-1, head_dim))
    table = table.to(device)
    weights = torch.randn(batches * next_n, heads, device=device)
    q_values = torch.randn(batches, next_n, heads, head_dim, device=device)
    q: Any = formats.quantize_mxfp4(q_values) if fp4 else q_values.to(E4M3)
    exact_q = formats.dequantize_mxfp4(*q) if fp4 else q.float()

    def call(
        context_lens: torch.Tensor,
        max_context_len: int,
        *,
        shares: int = 132,
        clean_logits: bool = False,
        logits_dtype: torch.dtype = torch.float32,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        function = mqa_logits.fp8_fp4_paged_mqa_logits if fp4 else mqa_logits.fp8_paged_mqa_logits
        schedule = mqa_logits.get_paged_mqa_logits_metadata(context_lens, page, shares)
        return function(
            *(q, cache, weights, context_lens, table, schedule, max_context_len, clean_logits),
            logits_dtype=logits_dtype,
            out=out,
        )

    return Paged(call, (q, cache, weights, table), exact_q, keys, weights, lengths)


def counts_of(lengths: list[int], next_n: int) -> list[int]:
    """Return the keys that each row sees when there is one length for a batch."""
    return [max(length - next_n + i + 1, 0) for length in lengths for i in range(next_n)]
