"""What MQA logits take: every check raises one sentence that has the rule and what would be valid."""

from __future__ import annotations

import operator

import torch
from torch import Tensor

from megamoe.kernels.mqa_instances import HEAD_DIMS, HEADS

__all__ = [
    "E4M3",
    "FP4_DTYPES",
    "MAX_COUNT",
    "check_count",
    "check_logits_dtype",
    "check_one_of",
    "check_output",
    "check_pair",
    "check_queries",
    "check_same_device",
    "check_scale_words",
    "check_shape",
    "check_tensor",
    "check_tensors",
    "check_weights",
    "whole_number",
]

E4M3 = torch.float8_e4m3fn
FP4_DTYPES = tuple(getattr(torch, name) for name in ("uint8", "int8", "float4_e2m1fn_x2") if hasattr(torch, name))
MAX_COUNT = 2**30  # of keys, columns, and heads over all rows: positions of a slot stay 32-bit numbers
_ROW_ALIGNMENT = 32  # elements: rows of an output that is allocated here begin at multiples of 64 bytes or more


def whole_number(name: str, value: int) -> int:
    """Return the number as an int, refusing what is not a whole one."""
    try:
        return operator.index(value)
    except TypeError:
        raise ValueError(f"{name}: must be a whole number, got {value!r}") from None


def check_tensors(**named: object) -> None:
    """Refuse what is no tensor."""
    for name, value in named.items():
        if not isinstance(value, Tensor):
            raise ValueError(f"{name}: must be a tensor, got {type(value).__name__}")


def check_one_of(name: str, value: int, allowed: tuple[int, ...]) -> None:
    """Refuse what is no number, or not among the allowed ones."""
    if whole_number(name, value) not in allowed:
        raise ValueError(f"{name}: must be one of {', '.join(map(str, allowed))}, got {value}")


def check_tensor(name: str, value: object, *dtypes: torch.dtype) -> Tensor:
    """Return `value`, refusing what is no tensor of one of the dtypes."""
    if not isinstance(value, Tensor):
        raise ValueError(f"{name}: must be a tensor, got {type(value).__name__}")
    if value.dtype not in dtypes:
        allowed = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
        raise ValueError(f"{name}: must be {allowed}, got {str(value.dtype).removeprefix('torch.')}")
    return value


def check_shape(name: str, value: Tensor, expected: tuple[int, ...], words: str) -> None:
    """Refuse another shape; `words` says what the expected one is."""
    if tuple(value.shape) != expected:
        raise ValueError(f"{name}: must be {words} = {list(expected)}, got {list(value.shape)}")


def check_pair(name: str, pair: object) -> tuple[object, object]:
    """Return the two, refusing what is no pair."""
    if not (isinstance(pair, (tuple, list)) and len(pair) == 2):
        raise ValueError(f"{name}: must be a pair (values, scales), got {type(pair).__name__}")
    return pair[0], pair[1]


def check_queries(q: object, dims: str) -> tuple[Tensor, Tensor | None, int, bool]:
    """Return the values (codes as uint8), the words of scales, head_dim, and whether it is MXFP4."""
    values, scales = check_pair("q", q)
    fp4 = scales is not None
    values = check_tensor("q", values, *(FP4_DTYPES if fp4 else (E4M3,)))
    if values.dim() != dims.count(",") + 1:
        raise ValueError(f"q: must be {dims}, got {list(values.shape)}")
    if not values.is_contiguous():
        raise ValueError(f"q: must be contiguous, got strides {values.stride()}")
    check_count("q: number of heads over all rows", values.shape[:-1].numel())
    head_dim = values.shape[-1] * (2 if fp4 else 1)
    check_one_of("q: heads", values.shape[-2], HEADS)
    check_one_of("q: head_dim", head_dim, HEAD_DIMS)
    if not fp4:
        return values, None, head_dim, False
    return (
        values.view(torch.uint8),
        check_scale_words("q scales", scales, tuple(values.shape[:-1]), head_dim),
        head_dim,
        True,
    )


def check_scale_words(name: str, scales: object, shape: tuple[int, ...], head_dim: int) -> Tensor:
    """Return UE8M0 codes as contiguous int32, one word a row."""
    dtypes = [torch.int32, torch.uint8]
    if hasattr(torch, "float8_e8m0fnu"):
        dtypes.append(torch.float8_e8m0fnu)
    found = check_tensor(name, scales, *dtypes)
    if found.dtype == torch.int32:
        check_shape(name, found, shape, "one word for each row of codes,")
        return found.contiguous()
    groups = head_dim // 32
    check_shape(name, found, (*shape, groups), "one code for 32 of head_dim,")
    codes = torch.zeros((*shape, 4), dtype=torch.uint8, device=found.device)
    codes[..., :groups] = found.view(torch.uint8)
    return codes.view(torch.int32).squeeze(-1)


def check_logits_dtype(dtype: object) -> None:
    """Refuse what logits cannot be."""
    if not any(dtype is allowed for allowed in (torch.float32, torch.bfloat16)):
        raise ValueError(f"logits_dtype: must be float32 or bfloat16, got {str(dtype).removeprefix('torch.')}")


def check_output(out: Tensor | None, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return `out`, or a new one, refusing what the kernels can't write to."""
    check_logits_dtype(dtype)
    if out is None:
        stride = -(-columns // _ROW_ALIGNMENT) * _ROW_ALIGNMENT
        return torch.empty((rows, stride), dtype=dtype, device=device)[:, :columns]
    check_tensor("out", out, dtype)
    check_shape("out", out, (rows, columns), "[rows, columns]")
    if (columns > 1 and out.stride(1) != 1) or (rows > 1 and out.stride(0) < columns):
        raise ValueError(f"out: columns must be neighbours and rows must not overlap, got strides {out.stride()}")
    return out


def check_same_device(q: Tensor, **others: Tensor | None) -> None:
    """Refuse tensors that are not where q is; None is not asked."""
    for name, tensor in others.items():
        if tensor is not None and tensor.device != q.device:
            raise ValueError(f"{name}: must be on the device of q, {q.device}, got {tensor.device}")


def check_count(name: str, value: int) -> int:
    """Return the number, refusing what is no whole one or is below 0 or above MAX_COUNT."""
    count = whole_number(name, value)
    if not 0 <= count <= MAX_COUNT:
        raise ValueError(f"{name}: must be from 0 to {MAX_COUNT}, got {count}")
    return count


def check_weights(weights: Tensor, rows: int, heads: int) -> None:
    """Refuse weights that are not FP32 [rows, heads] with heads neighbours."""
    check_tensor("weights", weights, torch.float32)
    check_shape("weights", weights, (rows, heads), "[rows, heads]")
    if weights.stride(1) != 1:
        raise ValueError(f"weights: heads must be neighbours, got strides {weights.stride()}")
