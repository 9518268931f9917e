"""Launching the MQA logits kernels: a prepared plan per problem, whose launch only needs the pointers."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch

from megamoe.kernels.jit import load
from megamoe.kernels.jit.driver import TENSOR_MAP_BYTES, PreparedLaunch, get_driver
from megamoe.kernels.mqa_instances import ARGS_BYTES, MqaInstance

__all__ = ["Plan", "Pointers", "Problem"]

# MqaArgs (impls/mqa_logits_args.cuh): maps of queries, keys and scales, then these
_Q_MAP, _KEYS_MAP, _SCALES_MAP, _REST_AT = (i * TENSOR_MAP_BYTES for i in range(4))
_POINTERS = struct.Struct("<9Q")  # q_codes, q_exponents, weights, starts, ends, block_table, schedule, out, page_scales
_SIZES = struct.Struct("<3q11i")
_SIZES_AT = _REST_AT + _POINTERS.size


@dataclass(frozen=True)
class Problem:
    """What fixes a plan; the fields of MqaArgs of these names say what they are.

    Attributes:
        instance: the kernel.
        device: CUDA device index.
        grid: blocks.
        num_q_rows: rows of queries, over all batches.
    """

    instance: MqaInstance
    device: int
    grid: int
    num_q_rows: int
    out_stride: int
    weights_stride: int
    page_bytes: int
    num_rows: int
    num_keys: int
    num_columns: int
    next_n: int
    block_table_stride: int
    num_pages: int
    page: int
    clean: bool
    compressed: bool
    lengths_of_rows: bool


@dataclass(frozen=True)
class Pointers:
    """Addresses; 0 for what a problem has not. `q`, `keys`, `scales`: of the tensor maps, or of the MXFP4 queries."""

    q: int
    q_exponents: int
    keys: int
    scales: int
    weights: int
    starts: int
    ends: int
    block_table: int
    schedule: int
    out: int


class Plan(PreparedLaunch):
    """A checked problem, ready to launch.

    Args:
        problem: its sizes.
        pointers: addresses of the first call; those of q, keys and scales are multiples of 16.

    Raises:
        JitError: the kernel can't be compiled or loaded, or the driver refuses a tensor map.
    """

    def __init__(self, problem: Problem, pointers: Pointers) -> None:
        p, instance = problem, problem.instance
        super().__init__(
            instance.name,
            load(instance.source(), p.device).address,
            p.grid,
            instance.threads,
            instance.shared_bytes,
            ARGS_BYTES,
        )
        self.device, self.is_alone = p.device, torch.cuda.device_count() <= 1
        self._fp4, self._paged, self._page = instance.fp4, instance.paged, p.page
        heads, head_dim = instance.heads, instance.head_dim
        self._row_bytes = head_dim // 2 if instance.fp4 else head_dim
        encode = get_driver().encode_tensor_map
        if not self._fp4:
            q_rows = (p.num_q_rows * heads, instance.queries * heads)
            encode(self.address + _Q_MAP, pointers.q, (head_dim, q_rows[0]), (head_dim,), (128, q_rows[1]))
        keys_in_page = p.page if instance.paged else p.num_keys
        page_bytes = p.page_bytes if instance.paged else p.num_keys * self._row_bytes
        encode(
            self.address + _KEYS_MAP,
            pointers.keys,
            (self._row_bytes, keys_in_page, p.num_pages if instance.paged else 1),
            (self._row_bytes, page_bytes),
            (
                self._row_bytes if instance.fp4 else 128,
                min(instance.keys, p.page) if instance.paged else instance.keys,
                1,
            ),
            swizzled=not instance.fp4,
        )
        if not instance.paged:
            stride = -(-p.num_keys // 4) * 16  # of a second row, which there is not
            encode(
                self.address + _SCALES_MAP,
                pointers.scales,
                (p.num_keys, 1),
                (stride,),
                (instance.keys, 1),
                words=True,
                swizzled=False,
            )
        _SIZES.pack_into(
            self.bytes,
            _SIZES_AT,
            *(p.out_stride, p.weights_stride, p.page_bytes, p.num_rows, p.num_keys, p.num_columns, p.next_n),
            *(p.block_table_stride, p.num_pages, p.page, max(p.page, 1).bit_length() - 1),
            *(int(p.clean), int(p.compressed), int(p.lengths_of_rows)),
        )
        self._pointers: Pointers | None = None
        self._mapped = pointers
        self.point(pointers)

    def point(self, pointers: Pointers) -> None:
        """Let the next launches take tensors at other addresses; those of q, keys and scales are multiples of 16."""
        if pointers == self._pointers:
            return
        replace, mapped = get_driver().replace_address, self._mapped
        if pointers.q != mapped.q and not self._fp4:
            replace(self.address + _Q_MAP, pointers.q)
        if pointers.keys != mapped.keys:
            replace(self.address + _KEYS_MAP, pointers.keys)
        if pointers.scales != mapped.scales and not self._paged:
            replace(self.address + _SCALES_MAP, pointers.scales)
        page_scales = pointers.keys + self._page * self._row_bytes if self._paged else 0
        _POINTERS.pack_into(
            self.bytes,
            _REST_AT,
            *(pointers.q if self._fp4 else 0, pointers.q_exponents, pointers.weights, pointers.starts, pointers.ends),
            *(pointers.block_table, pointers.schedule, pointers.out, page_scales),
        )
        self._pointers = self._mapped = pointers
