"""The lightning indexer's choice: MQA logits and their top-k, part by part, so that few logits exist at a time.

Each function gives the indices that the logits of all rows and `topk_indices` over them would give: a row's keys, in
any order or ascending, then -1. Parts share one buffer of at most `max_logits_bytes`, the largest thing that a call
allocates besides its result.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megamoe.kernels import mqa_logits
from megamoe.kernels.gemm import get_num_sms
from megamoe.kernels.mqa_checks import (
    check_count,
    check_logits_dtype,
    check_one_of,
    check_pair,
    check_tensors,
    whole_number,
)
from megamoe.kernels.mqa_instances import MAX_NEXT_N
from megamoe.kernels.topk import check_k, topk_indices

__all__ = [
    "MAX_LOGITS_BYTES",
    "fp8_fp4_mqa_topk",
    "fp8_fp4_paged_mqa_topk",
    "fp8_mqa_topk",
    "fp8_paged_mqa_topk",
]

Scaled = tuple[Tensor, "Tensor | None"]

MAX_LOGITS_BYTES = 1 << 30
_ROW_ALIGNMENT = 32  # elements


def fp8_mqa_topk(
    q: Tensor,
    kv: tuple[Tensor, Tensor],
    weights: Tensor,
    cu_seq_len_k_start: Tensor,
    cu_seq_len_k_end: Tensor,
    k: int,
    max_seqlen_k: int = 0,
    *,
    max_logits_bytes: int = MAX_LOGITS_BYTES,
    logits_dtype: torch.dtype = torch.float32,
    deterministic: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Return the k keys of the largest logits of each row, among those of its window.

    Args:
        q, kv, weights, cu_seq_len_k_start, cu_seq_len_k_end: as of `mqa_logits.fp8_mqa_logits`.
        k: 1 to 2048.
        max_seqlen_k: at least the longest window, which makes the buffer as narrow; 0 for all keys. Keys of a window
            beyond it are left out.
        max_logits_bytes: bound of the buffer; at least one row of logits.
        logits_dtype: FP32 or BF16; in BF16 more logits are equal, and lower keys win.
        deterministic: whether a row's keys ascend.
        out: int32 `[rows, k]` with unit column stride, or None.

    Returns:
        int32 `[rows, k]` rows of kv, then -1.

    Raises:
        ValueError: an argument outside the above, or a budget below one row; the message has what is allowed.
    """
    return _dense(
        (q, None), kv, weights, cu_seq_len_k_start, cu_seq_len_k_end, k, max_seqlen_k, max_logits_bytes, logits_dtype,
        deterministic, out,
    )  # fmt: skip


def fp8_fp4_mqa_topk(
    q: Scaled,
    kv: tuple[Tensor, Tensor],
    weights: Tensor,
    cu_seq_len_k_start: Tensor,
    cu_seq_len_k_end: Tensor,
    k: int,
    max_seqlen_k: int = 0,
    *,
    max_logits_bytes: int = MAX_LOGITS_BYTES,
    logits_dtype: torch.dtype = torch.float32,
    deterministic: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """As `fp8_mqa_topk`, with the operands of `mqa_logits.fp8_fp4_mqa_logits`."""
    return _dense(
        q, kv, weights, cu_seq_len_k_start, cu_seq_len_k_end, k, max_seqlen_k, max_logits_bytes, logits_dtype,
        deterministic, out,
    )  # fmt: skip


def fp8_paged_mqa_topk(
    q: Tensor,
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    schedule_meta: Tensor | None,
    max_context_len: int,
    k: int,
    *,
    max_logits_bytes: int = MAX_LOGITS_BYTES,
    logits_dtype: torch.dtype = torch.float32,
    deterministic: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Return the k keys of the largest logits of the last tokens of every batch, in a paged cache.

    Args:
        q, kv_cache, weights, context_lens, block_table, max_context_len: as of `mqa_logits.fp8_paged_mqa_logits`.
        schedule_meta: of `get_paged_mqa_logits_metadata` for all batches, used where their logits fit the budget; None
            makes it.
        k, max_logits_bytes, logits_dtype, deterministic, out: as of `fp8_mqa_topk`; the budget is at least the rows of
            one batch.

    Returns:
        int32 `[batches * next_n, k]` places in the row's sequence, then -1.

    Raises:
        ValueError: as `fp8_mqa_topk`.
    """
    return _paged(
        (q, None), kv_cache, weights, context_lens, block_table, schedule_meta, max_context_len, k, max_logits_bytes,
        logits_dtype, deterministic, out,
    )  # fmt: skip


def fp8_fp4_paged_mqa_topk(
    q: Scaled,
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    schedule_meta: Tensor | None,
    max_context_len: int,
    k: int,
    *,
    max_logits_bytes: int = MAX_LOGITS_BYTES,
    logits_dtype: torch.dtype = torch.float32,
    deterministic: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """As `fp8_paged_mqa_topk`, with the operands of `mqa_logits.fp8_fp4_paged_mqa_logits`."""
    return _paged(
        q, kv_cache, weights, context_lens, block_table, schedule_meta, max_context_len, k, max_logits_bytes,
        logits_dtype, deterministic, out,
    )  # fmt: skip


def _dense(
    q: Scaled,
    kv: tuple[Tensor, Tensor],
    weights: Tensor,
    starts: Tensor,
    ends: Tensor,
    k: int,
    max_seqlen_k: int,
    max_logits_bytes: int,
    dtype: torch.dtype,
    deterministic: bool,
    out: Tensor | None,
) -> Tensor:
    values, scales = _queries(q, "[rows, heads, head_dim]")
    keys, _ = check_pair("kv", kv)
    check_tensors(kv=keys, weights=weights, cu_seq_len_k_start=starts, cu_seq_len_k_end=ends)
    max_seqlen_k = check_count("max_seqlen_k", max_seqlen_k)
    rows, num_keys = values.shape[0], kv[0].shape[0]
    columns = max_seqlen_k or num_keys
    out = _result(out, rows, k, values.device)
    starts, ends = starts.contiguous(), ends.contiguous()
    shifts = None
    windows = (starts, ends)
    if max_seqlen_k:  # a column counts from the window's first key
        shifts = starts.clamp(0, num_keys)
        windows = (torch.zeros_like(shifts), ends.clamp(0, num_keys) - shifts)

    def run(part: slice, buffer: Tensor) -> None:
        part_q = values[part], None if scales is None else scales[part]
        logits = mqa_logits.fp8_fp4_mqa_logits(
            part_q, kv, weights[part], starts[part], ends[part], False, max_seqlen_k, dtype, out=buffer
        )
        topk_indices(
            logits, k, *(window[part] for window in windows), deterministic=deterministic,
            shifts=None if shifts is None else shifts[part], out=out[part],
        )  # fmt: skip

    _in_parts(run, rows, 1, columns, dtype, max_logits_bytes, values.device)
    return out


def _paged(
    q: Scaled,
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    schedule_meta: Tensor | None,
    max_context_len: int,
    k: int,
    max_logits_bytes: int,
    dtype: torch.dtype,
    deterministic: bool,
    out: Tensor | None,
) -> Tensor:
    values, scales = _queries(q, "[batches, next_n, heads, head_dim]")
    check_tensors(kv_cache=kv_cache, weights=weights, context_lens=context_lens, block_table=block_table)
    max_context_len = check_count("max_context_len", max_context_len)
    batches, next_n = values.shape[:2]
    check_one_of("q: next_n", next_n, tuple(range(1, MAX_NEXT_N + 1)))
    if kv_cache.dim() != 4 or block_table.dim() != 2:
        got = f"{list(kv_cache.shape)} and {list(block_table.shape)}"
        raise ValueError(f"kv_cache, block_table: must be [num_pages, page, 1, any] and [batches, any], got {got}")
    context_lens = context_lens.contiguous()
    out = _result(out, batches * next_n, k, values.device)
    ends = context_lens
    if context_lens.dim() == 1 and next_n > 1:
        ends = context_lens.clamp(min=0)[:, None] + torch.arange(1 - next_n, 1, dtype=torch.int32, device=values.device)
    ends = ends.reshape(-1)
    page = kv_cache.shape[1]
    room = block_table.shape[1] * page if kv_cache.shape[0] else 0
    written = min(max_context_len, room)  # columns beyond it are nobody's

    def run(part: slice, buffer: Tensor) -> None:
        part_rows = slice(part.start * next_n, part.stop * next_n)
        lens, plan = context_lens[part], schedule_meta
        if plan is None or part != slice(0, batches):
            plan = mqa_logits.get_paged_mqa_logits_metadata(lens, page, get_num_sms() if values.is_cuda else 1)
        logits = mqa_logits.fp8_fp4_paged_mqa_logits(
            (values[part], None if scales is None else scales[part]), kv_cache, weights[part_rows], lens,
            block_table[part], plan, max_context_len, False, dtype, out=buffer,
        )  # fmt: skip
        topk_indices(logits[:, :written], k, None, ends[part_rows], deterministic=deterministic, out=out[part_rows])

    _in_parts(run, batches, next_n, max_context_len, dtype, max_logits_bytes, values.device)
    return out


def _queries(q: object, dims: str) -> tuple[Tensor, Tensor | None]:
    """Return the pair; what else is wrong with it the logits functions say of its parts."""
    values, scales = check_pair("q", q)
    check_tensors(q=values)
    assert isinstance(values, Tensor)
    if values.dim() != dims.count(",") + 1:
        raise ValueError(f"q: must be {dims}, got {list(values.shape)}")
    if scales is None:
        return values, None
    check_tensors(**{"q scales": scales})
    assert isinstance(scales, Tensor)
    return values, scales


def _result(out: Tensor | None, rows: int, k: int, device: torch.device) -> Tensor:
    """Return where the indices go; what is wrong with a given one `topk_indices` says of its parts."""
    k = check_k(k)
    if out is None:
        return torch.empty((rows, k), dtype=torch.int32, device=device)
    check_tensors(out=out)
    if tuple(out.shape) != (rows, k):
        raise ValueError(f"out: must be int32 [{rows}, {k}], got {out.dtype} {list(out.shape)}")
    return out


def _in_parts(
    run: Callable[[slice, Tensor], None],
    count: int,
    rows_each: int,
    columns: int,
    dtype: torch.dtype,
    max_logits_bytes: int,
    device: torch.device,
) -> None:
    """Call run(part, buffer) for slices of `count` whose logits fit, `rows_each` rows of `columns` for each."""
    check_logits_dtype(dtype)
    max_logits_bytes = whole_number("max_logits_bytes", max_logits_bytes)
    stride = -(-columns // _ROW_ALIGNMENT) * _ROW_ALIGNMENT
    row_bytes = stride * torch.empty((), dtype=dtype).element_size()
    step = count if row_bytes == 0 else min(count, max_logits_bytes // (row_bytes * rows_each))
    if step <= 0 < count:
        what = "a row" if rows_each == 1 else f"the {rows_each} rows of a batch"
        raise ValueError(
            f"max_logits_bytes: must hold {what} of {columns} logits, {row_bytes * rows_each} bytes, "
            f"got {max_logits_bytes}"
        )
    step = max(step, 0)
    buffer = torch.empty((step * rows_each, stride), dtype=dtype, device=device)[:, :columns]
    for first in range(0, count, max(step, 1)):
        last = min(first + step, count)
        run(slice(first, last), buffer[: (last - first) * rows_each])
