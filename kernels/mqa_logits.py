"""MQA logits of the lightning indexer: logits[row, key] = sum over heads of max(q . k, 0) * weight.

Names, argument order and defaults are those of DeepGEMM's public interface. On CUDA tensors the SM90 kernels run; on
CPU tensors the same functions compute in FP32. The kernels add the heads of a logit in one order, whatever other rows
or keys the call has and however the work is divided.

FP8 keys: E4M3 values and an FP32 scale each, by which the logits are multiplied. MXFP4 queries and keys: E2M1 codes,
two a byte, low nibble first, and for each query head and each key a 4-byte word of UE8M0 codes, one for 32 of the head
size, lowest byte first (int32 `[...]`; uint8 or float8_e8m0fnu `[..., head_dim / 32]` is taken as well). The kernels
multiply MXFP4 as E4M3 relative to the largest of a row's scales: exact while those span at most 2^11, groups below are
zero.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

from megamoe.kernels.gemm import get_num_sms
from megamoe.kernels.mqa_checks import (
    E4M3,
    FP4_DTYPES,
    MAX_COUNT,
    check_count,
    check_one_of,
    check_output,
    check_pair,
    check_queries,
    check_same_device,
    check_scale_words,
    check_shape,
    check_tensor,
    check_weights,
    whole_number,
)
from megamoe.kernels.mqa_instances import (
    MAX_NEXT_N,
    METADATA_ARGS,
    METADATA_THREADS,
    PAGES,
    metadata_source,
    select_dense,
    select_paged,
)
from megamoe.kernels.mqa_launch import Plan, Pointers, Problem
from megamoe.kernels.mqa_reference import dequantize_fp4, paged_keys, paged_metadata, write_logits
from megamoe.kernels.packed_launch import launch_packed

__all__ = [
    "fp8_fp4_mqa_logits",
    "fp8_fp4_paged_mqa_logits",
    "fp8_mqa_logits",
    "fp8_paged_mqa_logits",
    "get_paged_mqa_logits_metadata",
]

Scaled = tuple[Tensor, "Tensor | None"]

_MAX_PLANS = 1024
_plans = threading.local()
# a build of torch without CUDA lacks it, and needs it not
_current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def fp8_mqa_logits(
    q: Tensor,
    kv: tuple[Tensor, Tensor],
    weights: Tensor,
    cu_seq_len_k_start: Tensor,
    cu_seq_len_k_end: Tensor,
    clean_logits: bool = True,
    max_seqlen_k: int = 0,
    *,
    logits_dtype: torch.dtype = torch.float32,
    out: Tensor | None = None,
) -> Tensor:
    """Return the logits of every row over its window of neighbouring keys.

    Args:
        q: E4M3 `[rows, heads, head_dim]`; heads 8, 16, 32 or 64, head_dim 32, 64 or 128.
        kv: E4M3 `[num_keys, head_dim]` and FP32 scales `[num_keys]`; any number of keys.
        weights: FP32 `[rows, heads]`; rows may be strided.
        cu_seq_len_k_start, cu_seq_len_k_end: int32 `[rows]`; a row has keys start <= key < end.
        clean_logits: whether columns outside of a row's window become -inf; otherwise they are not written.
        max_seqlen_k: 0 for a column for each key; otherwise that many columns, the first being the window's first key,
            and keys beyond them are left out.
        logits_dtype: FP32 or BF16.
        out: `[rows, num_keys or max_seqlen_k]` to write to, rows may be strided; None allocates it.

    Returns:
        The logits; `out` if it was given.

    Raises:
        ValueError: a dtype, shape, stride or device outside the above; the message has what is allowed.
    """
    return _dense(
        (q, None), kv, weights, cu_seq_len_k_start, cu_seq_len_k_end, clean_logits, max_seqlen_k, logits_dtype, out
    )


def fp8_fp4_mqa_logits(
    q: Scaled,
    kv: tuple[Tensor, Tensor],
    weights: Tensor,
    cu_seq_len_k_start: Tensor,
    cu_seq_len_k_end: Tensor,
    clean_logits: bool = True,
    max_seqlen_k: int = 0,
    logits_dtype: torch.dtype = torch.float32,
    schedule_meta: Tensor | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """As `fp8_mqa_logits`, of MXFP4 queries and keys, or of E4M3 ones where q is (values, None).

    Args:
        q: codes `[rows, heads, head_dim / 2]` and scales `[rows, heads]`.
        kv: codes `[num_keys, head_dim / 2]` and scales `[num_keys]`.
        weights, cu_seq_len_k_start, cu_seq_len_k_end, clean_logits, max_seqlen_k, logits_dtype, out: see there.
        schedule_meta: None; these kernels divide the work themselves.

    Raises:
        ValueError: as there.
    """
    if schedule_meta is not None:
        raise ValueError("schedule_meta: must be None, because the kernels divide the work themselves")
    return _dense(q, kv, weights, cu_seq_len_k_start, cu_seq_len_k_end, clean_logits, max_seqlen_k, logits_dtype, out)


def get_paged_mqa_logits_metadata(
    context_lens: Tensor, block_kv: int, num_sms: int, indices: Tensor | None = None
) -> Tensor:
    """Return how the batches of paged logits are divided among SMs.

    Args:
        context_lens: int32 `[batches]` or `[batches, next_n]`, contiguous, as for `fp8_paged_mqa_logits`.
        block_kv: keys of a page: 16, 32, 64, 128 or 256. The division does not depend on it.
        num_sms: shares, each of about as many keys; as many blocks will run.
        indices: None.

    Returns:
        int32 `[num_sms + 1, 2]`: batch, and number of the 256 keys of it, where a share begins.

    Raises:
        ValueError: an argument outside the above; the message has what is allowed.
    """
    check_tensor("context_lens", context_lens, torch.int32)
    if context_lens.dim() not in (1, 2) or not context_lens.is_contiguous() or context_lens.shape[1:] == (0,):
        got = f"{list(context_lens.shape)} with strides {context_lens.stride()}"
        raise ValueError(f"context_lens: must be contiguous [batches] or [batches, next_n], got {got}")
    check_one_of("block_kv", block_kv, PAGES)
    num_sms = whole_number("num_sms", num_sms)
    if num_sms < 1:
        raise ValueError(f"num_sms: must be at least 1, got {num_sms}")
    if indices is not None:
        raise ValueError("indices: must be None, because a batch has the same number of rows throughout")
    batches = context_lens.shape[0]
    if not context_lens.is_cuda:
        return paged_metadata(context_lens, num_sms)
    out = torch.empty((num_sms + 1, 2), dtype=torch.int32, device=context_lens.device)
    next_n = context_lens.shape[1] if context_lens.dim() == 2 else 1
    launch_packed(
        "mqa_logits_metadata", metadata_source, out.get_device(), 1, METADATA_THREADS, METADATA_ARGS,
        (context_lens.data_ptr(), out.data_ptr(), batches, next_n, num_sms),
    )  # fmt: skip
    return out


def fp8_paged_mqa_logits(
    q: Tensor,
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    schedule_meta: Tensor,
    max_context_len: int,
    clean_logits: bool = False,
    indices: Tensor | None = None,
    *,
    logits_dtype: torch.dtype = torch.float32,
    out: Tensor | None = None,
) -> Tensor:
    """Return the logits of the last tokens of every batch over its keys in a paged cache.

    Args:
        q: E4M3 `[batches, next_n, heads, head_dim]`; next_n 1 to 4, heads 8, 16, 32 or 64, head_dim 32, 64 or 128.
        kv_cache: uint8 `[num_pages, page, 1, head_dim + 4]`; page 16, 32, 64, 128 or 256. A page holds the E4M3 values
            of its keys, then their FP32 scales; pages may lie at any stride that is a multiple of 16 bytes.
        weights: FP32 `[batches * next_n, heads]`; rows may be strided.
        context_lens: int32 `[batches]`: row i of a batch sees the first context_len - next_n + i + 1 keys; or
            `[batches, next_n]`: the number of keys of each row. Zero is legal.
        block_table: int32 `[batches, num_blocks]`, the pages of a batch in order; rows may be strided. Keys that it has
            no room for are left out.
        schedule_meta: of `get_paged_mqa_logits_metadata`.
        max_context_len: columns; keys beyond them are left out.
        clean_logits: whether columns from the row's number of keys on become -inf; otherwise they are not written.
        indices: None.
        logits_dtype: FP32 or BF16.
        out: `[batches * next_n, max_context_len]` to write to, rows may be strided; None allocates it.

    Returns:
        The logits; `out` if it was given.

    Raises:
        ValueError: a dtype, shape, stride or device outside the above; the message has what is allowed.
    """
    given = weights, context_lens, block_table, schedule_meta, max_context_len, clean_logits, logits_dtype, indices, out
    return _paged((q, None), kv_cache, *given)


def fp8_fp4_paged_mqa_logits(
    q: Scaled,
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    schedule_meta: Tensor,
    max_context_len: int,
    clean_logits: bool = False,
    logits_dtype: torch.dtype = torch.float32,
    indices: Tensor | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """As `fp8_paged_mqa_logits`, of MXFP4 queries and keys, or of E4M3 ones where q is (values, None).

    Args:
        q: codes `[batches, next_n, heads, head_dim / 2]` and scales `[batches, next_n, heads]`.
        kv_cache: uint8 `[num_pages, page, 1, head_dim / 2 + 4]`: a page has the codes of its keys, then their scales.
        weights, context_lens, block_table, schedule_meta, max_context_len, clean_logits, logits_dtype, indices, out:
            see there.

    Raises:
        ValueError: as there.
    """
    given = weights, context_lens, block_table, schedule_meta, max_context_len, clean_logits, logits_dtype, indices, out
    return _paged(q, kv_cache, *given)


def _aligned(tensor: Tensor) -> Tensor:
    """Return the tensor, or a copy of it whose address a tensor map takes."""
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def _has_kernels(tensor: Tensor) -> bool:
    return tensor.is_cuda


def _dense(
    q: object,
    kv: object,
    weights: Tensor,
    starts: Tensor,
    ends: Tensor,
    clean: bool,
    max_seqlen_k: int,
    dtype: torch.dtype,
    out: Tensor | None,
) -> Tensor:
    values, q_scales, head_dim, fp4 = check_queries(q, "[rows, heads, head_dim]")
    rows, heads, _ = values.shape
    keys, key_scales = check_pair("kv", kv)
    keys = check_tensor("kv", keys, *(FP4_DTYPES if fp4 else (E4M3,)))
    width = values.shape[-1]
    if keys.dim() != 2 or keys.shape[1] != width or not keys.is_contiguous():
        got = f"{list(keys.shape)} with strides {keys.stride()}"
        raise ValueError(f"kv: must be contiguous [num_keys, {width}] as the rows of q, got {got}")
    num_keys = keys.shape[0]
    check_count("kv: number of keys", num_keys)
    if fp4:
        keys = keys.view(torch.uint8)
        scales = check_scale_words("kv scales", key_scales, (num_keys,), head_dim)
    else:
        scales = check_tensor("kv scales", key_scales, torch.float32)
        check_shape("kv scales", scales, (num_keys,), "[num_keys]")
        scales = scales.contiguous()
    check_weights(weights, rows, heads)
    for name, tensor in (("cu_seq_len_k_start", starts), ("cu_seq_len_k_end", ends)):
        check_tensor(name, tensor, torch.int32)
        check_shape(name, tensor, (rows,), "[rows]")
    max_seqlen_k = check_count("max_seqlen_k", max_seqlen_k)
    check_same_device(
        values,
        q_scales=q_scales,
        kv=keys,
        kv_scales=scales,
        weights=weights,
        cu_seq_len_k_start=starts,
        cu_seq_len_k_end=ends,
    )
    compressed = max_seqlen_k > 0
    columns = max_seqlen_k if compressed else num_keys
    out = check_output(out, rows, columns, dtype, values.device)
    check_same_device(values, out=out)
    starts, ends = starts.contiguous(), ends.contiguous()
    if not _has_kernels(out):
        begin = starts.clamp(0, num_keys)
        if fp4:
            assert q_scales is not None
            operands = dequantize_fp4(values, q_scales, head_dim), dequantize_fp4(keys, scales, head_dim)
        else:
            operands = values.float(), keys.float()
        length = (ends.clamp(0, num_keys) - begin).clamp(min=0)
        factors = None if fp4 else scales
        write_logits(out, *operands, weights, begin, length, compressed=compressed, clean=clean, factors=factors)
        return out
    if rows == 0 or columns == 0:
        return out
    if num_keys == 0:
        return out.fill_(float("-inf")) if clean else out
    values, keys, scales = _aligned(values), _aligned(keys), _aligned(scales)
    device = values.get_device()
    problem = Problem(
        instance=select_dense(heads, head_dim, fp4, dtype == torch.bfloat16),
        device=device,
        grid=_blocks(device),
        num_q_rows=rows,
        out_stride=out.stride(0) if rows > 1 else columns,
        weights_stride=weights.stride(0) if rows > 1 else heads,
        page_bytes=0,
        num_rows=rows,
        num_keys=num_keys,
        num_columns=columns,
        next_n=1,
        block_table_stride=0,
        num_pages=0,
        page=0,
        clean=bool(clean),
        compressed=compressed,
        lengths_of_rows=False,
    )
    pointers = Pointers(
        q=values.data_ptr(),
        q_exponents=q_scales.data_ptr() if q_scales is not None else 0,
        keys=keys.data_ptr(),
        scales=scales.data_ptr(),
        weights=weights.data_ptr(),
        starts=starts.data_ptr(),
        ends=ends.data_ptr(),
        block_table=0,
        schedule=0,
        out=out.data_ptr(),
    )
    _launch(problem, pointers)
    return out


def _paged(
    q: object,
    cache: Tensor,
    weights: Tensor,
    lengths: Tensor,
    table: Tensor,
    schedule: Tensor,
    max_context_len: int,
    clean: bool,
    dtype: torch.dtype,
    indices: Tensor | None,
    out: Tensor | None,
) -> Tensor:
    if indices is not None:
        raise ValueError("indices: must be None, because a batch has the same number of rows throughout")
    values, q_scales, head_dim, fp4 = check_queries(q, "[batches, next_n, heads, head_dim]")
    batches, next_n, heads, width = values.shape
    check_one_of("q: next_n", next_n, tuple(range(1, MAX_NEXT_N + 1)))
    check_tensor("kv_cache", cache, torch.uint8)
    if cache.dim() != 4 or cache.shape[2] != 1 or cache.shape[3] != width + 4:
        raise ValueError(f"kv_cache: must be [num_pages, page, 1, {width + 4}], got {list(cache.shape)}")
    num_pages, page = cache.shape[:2]
    check_one_of("kv_cache: page", page, PAGES)
    page_bytes = cache.stride(0) if num_pages > 1 else page * (width + 4)
    if cache.stride(3) != 1 or cache.stride(1) != width + 4 or page_bytes % 16 or page_bytes < page * (width + 4):
        rule = f"strides must be (a multiple of 16 from {page * (width + 4)} on, {width + 4}, any, 1)"
        raise ValueError(f"kv_cache: {rule}, got {cache.stride()}")
    if cache.data_ptr() % 16:
        raise ValueError("kv_cache: must begin at a multiple of 16 bytes")
    rows = batches * next_n
    check_weights(weights, rows, heads)
    check_tensor("context_lens", lengths, torch.int32)
    of_rows = lengths.dim() == 2
    if tuple(lengths.shape) not in ((batches,), (batches, next_n)):
        raise ValueError(
            f"context_lens: must be [batches] = [{batches}] or [batches, next_n] = [{batches}, {next_n}], "
            f"got {list(lengths.shape)}"
        )
    check_tensor("block_table", table, torch.int32)
    if table.dim() != 2 or table.shape[0] != batches or (table.shape[1] > 1 and table.stride(1) != 1):
        got = f"{list(table.shape)} with strides {table.stride()}"
        raise ValueError(f"block_table: must be [batches, num_blocks] = [{batches}, any], blocks neighbours, got {got}")
    check_tensor("schedule_meta", schedule, torch.int32)
    if schedule.dim() != 2 or schedule.shape[0] < 2 or schedule.shape[1] != 2 or not schedule.is_contiguous():
        got = f"{list(schedule.shape)} with strides {schedule.stride()}"
        raise ValueError(f"schedule_meta: must be contiguous [num_sms + 1, 2], got {got}")
    max_context_len = check_count("max_context_len", max_context_len)
    check_same_device(
        values,
        q_scales=q_scales,
        kv_cache=cache,
        weights=weights,
        context_lens=lengths,
        block_table=table,
        schedule_meta=schedule,
    )
    out = check_output(out, rows, max_context_len, dtype, values.device)
    check_same_device(values, out=out)
    lengths = lengths.contiguous()
    room = min(table.shape[1] * page, MAX_COUNT) if num_pages else 0
    if not _has_kernels(out):
        counts = lengths.clamp(min=0)  # first, or the smallest int32 would wrap
        if not of_rows:
            counts = counts[:, None] - next_n + 1 + torch.arange(next_n, dtype=torch.int32)
        counts = counts.clamp(0, room)
        for b in range(batches):
            part = slice(b * next_n, (b + 1) * next_n)
            pages = table[b, : -(-int(counts[b].max()) // page)]
            codes, words = paged_keys(cache, pages, width)
            if fp4:
                assert q_scales is not None
                operands = dequantize_fp4(values[b], q_scales[b], head_dim), dequantize_fp4(codes, words, head_dim)
            else:
                operands = values[b].float(), codes.view(E4M3).float()
            factors = None if fp4 else words.view(torch.float32)
            begin = torch.zeros_like(counts[b])
            write_logits(
                out[part], *operands, weights[part], begin, counts[b], compressed=False, clean=clean, factors=factors
            )
        return out
    if rows == 0 or max_context_len == 0:
        return out
    if room == 0:
        return out.fill_(float("-inf")) if clean else out
    values = _aligned(values)
    problem = Problem(
        instance=select_paged(heads, head_dim, next_n, fp4, dtype == torch.bfloat16),
        device=values.get_device(),
        grid=schedule.shape[0] - 1,
        num_q_rows=rows,
        out_stride=out.stride(0) if rows > 1 else max_context_len,
        weights_stride=weights.stride(0) if rows > 1 else heads,
        page_bytes=page_bytes,
        num_rows=batches,
        num_keys=room,
        num_columns=max_context_len,
        next_n=next_n,
        block_table_stride=table.stride(0) if batches > 1 else table.shape[1],
        num_pages=num_pages,
        page=page,
        clean=bool(clean),
        compressed=False,
        lengths_of_rows=of_rows,
    )
    pointers = Pointers(
        q=values.data_ptr(),
        q_exponents=q_scales.data_ptr() if q_scales is not None else 0,
        keys=cache.data_ptr(),
        scales=0,
        weights=weights.data_ptr(),
        starts=0,
        ends=lengths.data_ptr(),
        block_table=table.data_ptr(),
        schedule=schedule.data_ptr(),
        out=out.data_ptr(),
    )
    _launch(problem, pointers)
    return out


def _blocks(device: int) -> int:
    return min(get_num_sms(), torch.cuda.get_device_properties(device).multi_processor_count)


def _launch(problem: Problem, pointers: Pointers) -> None:
    plans: dict[Problem, Plan] = _plans.__dict__.setdefault("known", {})
    plan = plans.get(problem)
    if plan is None:
        if len(plans) >= _MAX_PLANS:
            plans.clear()
        with torch.cuda.device(problem.device):
            plan = plans[problem] = Plan(problem, pointers)
    else:
        plan.point(pointers)
    if plan.is_alone or torch.cuda.current_device() == plan.device:
        plan(_current_stream(plan.device))
    else:
        with torch.cuda.device(plan.device):
            plan(_current_stream(plan.device))
