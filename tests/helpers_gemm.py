"""The grouped GEMM's host side without a GPU: a driver that stops right before the call, and problems to give it."""

from __future__ import annotations

import contextlib
import ctypes
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from helpers_packing import random_experts

from megamoe.kernels import gemm, gemm_launch
from megamoe.kernels.jit import driver
from megamoe.kernels.packing import pack_mxfp4

STREAM, KERNEL, SMS = 7, 4096, 132


@dataclass(frozen=True)
class Launch:
    """What a launch would have given to the driver.

    Attributes:
        grid, block, shared_bytes, stream: of the launch.
        x, w: addresses in the tensor maps.
        packed, w_scales, x_scales, d, d_stride, x_scales_stride, row_groups, counts, num_groups, max_rows, n,
        num_k_blocks, num_x_scales: fields of GroupedGemmArgs.
    """

    grid: int
    block: int
    shared_bytes: int
    stream: int
    x: int
    w: int
    packed: int
    w_scales: int
    x_scales: int
    d: int
    d_stride: int
    x_scales_stride: int
    row_groups: int
    counts: int
    num_groups: int
    max_rows: int
    n: int
    num_k_blocks: int
    num_x_scales: int


class FakeDriver:
    """Stands for `driver.Driver`.

    Args:
        launch: stands for cuLaunchKernelEx; None records what it gets in `launches`.
    """

    def __init__(self, launch: Callable[..., int] | None = None) -> None:
        self.launches: list[Launch] = []
        self.launch = self._record if launch is None else launch

    def encode_tensor_map(self, target: int, address: int, *_: object) -> None:
        ctypes.memmove(target, struct.pack("<Q", address), 8)

    replace_address = encode_tensor_map

    def error_name(self, status: int) -> str:
        return f"CUDA_ERROR_{status}"

    def _record(self, config: Any, function: Any, parameters: Any, extra: None) -> int:
        assert function.value == KERNEL and extra is None
        grid, y, z, block, by, bz, shared_bytes, _, stream = struct.unpack("<8IQ", ctypes.string_at(config.value, 40))
        assert (y, z, by, bz) == (1, 1, 1, 1)
        address = ctypes.c_void_p.from_address(parameters.value).value
        assert address is not None and address % 64 == 0
        data = ctypes.string_at(address, 384)
        fields = struct.unpack_from("<4Q2q2Q5i", data, 256)
        maps = struct.unpack_from("<Q", data)[0], struct.unpack_from("<Q", data, 128)[0]
        self.launches.append(Launch(grid, block, shared_bytes, stream, *maps, *fields))
        return 0


@contextlib.contextmanager
def without_gpu(fake: FakeDriver, comparer: Any = None) -> Iterator[None]:
    """Let CPU tensors take the way of CUDA tensors up to the driver call.

    Args:
        fake: the driver.
        comparer: stands for `gemm._comparer`; None leaves it.
    """
    properties = SimpleNamespace(multi_processor_count=SMS)
    with contextlib.ExitStack() as stack:
        for target, name, value in (
            (driver, "_driver", fake),
            (gemm_launch, "load", lambda source, device: SimpleNamespace(address=KERNEL)),
            (gemm, "_has_kernels", lambda out: True),
            (gemm, "_current_stream", lambda device: STREAM),
            (gemm, "_known", gemm._Known()),
            (gemm, "_comparer", comparer or gemm._comparer),
            (torch.cuda, "get_device_properties", lambda device: properties),
            (torch.cuda, "device_count", lambda: 1),
        ):
            stack.enter_context(mock.patch.object(target, name, value))
        yield


@dataclass
class Problem:
    """Operands of a public function, on the CPU.

    Attributes:
        call: the function; it is called with the rest.
        lhs, rhs, out: operands.
        groups: m_indices, masked_m, or None for a dense problem.
        expected_m: of the masked functions, else None.
    """

    call: Callable[..., None]
    lhs: tuple[torch.Tensor, torch.Tensor]
    rhs: Any
    out: torch.Tensor
    groups: torch.Tensor | None = None
    expected_m: int | None = None

    def __call__(self) -> None:
        if self.groups is None:
            self.call(self.lhs, self.rhs, self.out)
        elif self.expected_m is None:
            self.call(self.lhs, self.rhs, self.out, self.groups)
        else:
            self.call(self.lhs, self.rhs, self.out, self.groups, self.expected_m)


def problem(
    kind: str, form: str, granularity: str, *, groups: int = 4, rows: int = 64, n: int = 64, k: int = 256
) -> Problem:
    """Return a problem of zeros.

    Args:
        kind: "fp8", "sm90_ss" or "sm90_rs".
        form: "contiguous", "masked" or "dense" (one group).
        granularity: of the activation scales, "token" or "block128".
        groups, rows, n, k: sizes; rows of each group.
    """
    groups = 1 if form == "dense" else groups
    shape = {"contiguous": (groups * rows,), "masked": (groups, rows), "dense": (rows,)}[form]
    x = torch.zeros(*shape, k).to(torch.float8_e4m3fn)
    scales = torch.ones(*shape) if granularity == "token" else torch.ones(*shape, -(-k // 128))
    scales = scales if granularity == "token" else gemm.get_mn_major_tma_aligned_tensor(scales)
    rhs: Any
    if kind == "fp8":
        rhs = (torch.zeros(groups, n, k).to(torch.float8_e4m3fn), torch.ones(groups, -(-n // 128), -(-k // 128)))
        rhs = (rhs[0][0], rhs[1][0]) if form == "dense" else rhs
    else:
        rhs = pack_mxfp4(*random_experts(groups, n, k), kind)
    out = torch.zeros(*shape, n, dtype=torch.bfloat16)
    name = "fp8" if kind == "fp8" else "fp8_fp4"
    if form == "dense":
        return Problem(getattr(gemm, f"{name}_gemm_nt"), (x, scales), rhs, out)
    call = getattr(gemm, f"m_grouped_{name}_gemm_nt_{form}")
    if form == "masked":
        return Problem(call, (x, scales), rhs, out, torch.full((groups,), rows, dtype=torch.int32), rows)
    return Problem(call, (x, scales), rhs, out, torch.arange(groups, dtype=torch.int32).repeat_interleave(rows))
