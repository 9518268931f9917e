"""The host's part of a GEMM call, up to the driver: one launch, the right bytes, nothing old when tensors change."""

from __future__ import annotations

import threading
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from helpers_gemm import SMS, STREAM, FakeDriver, problem, without_gpu  # noqa: E402

from megamoe.kernels import gemm  # noqa: E402
from megamoe.kernels.gemm_instances import select_instance  # noqa: E402
from megamoe.kernels.jit import JitError  # noqa: E402

KINDS = ("fp8", "sm90_ss", "sm90_rs")
FORMS = ("contiguous", "masked", "dense")


@pytest.mark.parametrize("granularity", ["token", "block128"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_call_is_one_launch_with_these_arguments(kind: str, form: str, granularity: str) -> None:
    case, fake = problem(kind, form, granularity, rows=66, n=320, k=416), FakeDriver()
    with without_gpu(fake):
        case()
        case()
    first, second = fake.launches
    assert first == second
    groups = 1 if form == "dense" else 4
    weights = None if kind == "fp8" else kind
    instance = select_instance("fp8" if kind == "fp8" else "fp4", granularity, 66, form == "masked", layout=weights)
    assert (first.grid, first.block, first.stream) == (SMS, instance.threads, STREAM)
    assert first.shared_bytes == instance.shared_bytes(groups)
    w, w_scales = case.rhs if kind == "fp8" else (case.rhs.data, case.rhs.row_scale)
    assert (first.w, first.packed) == ((w.data_ptr(), 0) if kind == "fp8" else (0, w.data_ptr()))
    assert (first.x, first.w_scales, first.x_scales) == (
        case.lhs[0].data_ptr(),
        w_scales.data_ptr(),
        case.lhs[1].data_ptr(),
    )
    rows = groups * 66
    assert (first.d, first.d_stride, first.n, first.num_k_blocks) == (case.out.data_ptr(), 320, 320, 4)
    assert first.num_x_scales == -(-rows // 4) * 4 == first.x_scales_stride
    assert (first.num_groups, first.max_rows) == (groups, rows if form == "contiguous" else 66)
    pointer = 0 if case.groups is None else case.groups.data_ptr()
    assert (first.row_groups, first.counts) == ((pointer, 0) if form == "contiguous" else (0, pointer))


@pytest.mark.parametrize("plain", [False, True], ids=["torch's guard", "plain comparison"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_only_the_first_call_checks(kind: str, form: str, plain: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def comparer(tensors: tuple[Any, ...]) -> Any:
        seen = gemm._seen(tensors)
        return lambda *others: gemm._seen(others) == seen

    case, fake = problem(kind, form, "block128"), FakeDriver()
    with without_gpu(fake, comparer if plain else None):
        case()

        def refuse(*_: object) -> None:
            raise AssertionError("checked again")

        monkeypatch.setattr(gemm, "_check", refuse)
        case()
        case.lhs = (case.lhs[0].clone(), case.lhs[1])
        case.out = torch.empty_like(case.out)
        case()
        assert fake.launches[-1].x == case.lhs[0].data_ptr() and fake.launches[-1].d == case.out.data_ptr()
    assert len(fake.launches) == 3


@pytest.mark.parametrize("form", ["contiguous", "masked"])
@pytest.mark.parametrize("kind", ["fp8", "sm90_ss"])
def test_every_pointer_follows_its_tensor(kind: str, form: str) -> None:
    case, fake = problem(kind, form, "block128"), FakeDriver()
    with without_gpu(fake):
        case()
        kept = [case.lhs, case.rhs, case.out, case.groups]
        case.lhs = (case.lhs[0].clone(), gemm.get_mn_major_tma_aligned_tensor(case.lhs[1].contiguous()))
        if kind == "fp8":
            case.rhs = (case.rhs[0].clone(), case.rhs[1].clone())
        else:
            case.rhs = problem(kind, form, "block128").rhs
        assert case.groups is not None
        case.out, case.groups = case.out.clone(), case.groups.clone()
        case()
    first, second = fake.launches
    names = ("x", "w_scales", "x_scales", "d", "w" if kind == "fp8" else "packed")
    for name in (*names, "row_groups" if form == "contiguous" else "counts"):
        assert getattr(first, name) != getattr(second, name), name
    assert second.x_scales == case.lhs[1].data_ptr() and kept


def test_views_of_the_same_storage_are_told_apart() -> None:
    case, fake = problem("fp8", "contiguous", "token", rows=8, n=64, k=256), FakeDriver()
    with without_gpu(fake):
        case()
        wide = torch.zeros(32, 128, dtype=torch.bfloat16)
        case.out = wide[:, :64]
        case()
        case.out = torch.zeros(32, 256, dtype=torch.bfloat16)[:, :64]
        case()
        case.out = wide[:, :64]
        case()
    assert [launch.d_stride for launch in fake.launches] == [64, 128, 256, 128]
    assert fake.launches[1] == fake.launches[3]


def test_rows_that_vary_get_their_own_sizes() -> None:
    case, fake = problem("fp8", "contiguous", "block128", rows=64), FakeDriver()
    lhs, out, groups = case.lhs, case.out, case.groups
    assert groups is not None
    with without_gpu(fake):
        for rows in (256, 7, 255, 7, 256):
            case.lhs = (lhs[0][:rows], lhs[1][:rows])
            case.out, case.groups = out[:rows], groups[:rows]
            case()
    assert [launch.max_rows for launch in fake.launches] == [256, 7, 255, 7, 256]
    assert [launch.num_x_scales for launch in fake.launches] == [256, 8, 256, 8, 256]
    assert {launch.x_scales_stride for launch in fake.launches} == {256}


def test_no_rows_is_no_launch() -> None:
    fake = FakeDriver()
    with without_gpu(fake):
        for form in FORMS:
            problem("fp8", form, "block128", rows=0)()
    assert fake.launches == []


@pytest.mark.parametrize("granularity", ["token", "block128"])
def test_scales_in_another_order_are_copied_every_time(granularity: str) -> None:
    case, fake = problem("fp8", "contiguous", granularity, rows=9, k=512), FakeDriver()
    blocks = 1 if granularity == "token" else 4
    scales = torch.rand(36, 2 * blocks)[:, ::2]
    case.lhs = (case.lhs[0], scales)
    with without_gpu(fake):
        case()
        case()
    for launch in fake.launches:
        assert launch.x_scales not in (0, scales.data_ptr()) and launch.x_scales_stride == 36
    assert len(fake.launches) == 2


def test_number_of_sms_and_expected_rows_choose_anew() -> None:
    case, fake = problem("sm90_rs", "masked", "token"), FakeDriver()
    with without_gpu(fake):
        try:
            for sms, rows in ((None, 8), (5, 8), (None, 24), (1000, 24), (None, 8)):
                gemm.set_num_sms(sms)
                case.expected_m = rows
                case()
        finally:
            gemm.set_num_sms(None)
    assert [launch.grid for launch in fake.launches] == [132, 5, 132, 132, 132]
    assert len({launch.shared_bytes for launch in fake.launches}) == 2
    assert fake.launches[0] == fake.launches[4]


def test_threads_do_not_write_into_the_same_bytes() -> None:
    fake = FakeDriver()
    case = problem("fp8", "contiguous", "token")
    outputs = [torch.empty_like(case.out) for _ in range(4)]
    start = threading.Barrier(4)

    def work(out: Any) -> None:
        mine = problem("fp8", "contiguous", "token")
        mine.lhs, mine.rhs, mine.groups, mine.out = case.lhs, case.rhs, case.groups, out
        start.wait(10)
        for _ in range(300):
            mine()

    with without_gpu(fake):
        threads = [threading.Thread(target=work, args=(out,)) for out in outputs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    counts = {out.data_ptr(): sum(launch.d == out.data_ptr() for launch in fake.launches) for out in outputs}
    assert set(counts.values()) == {300} and len(fake.launches) == 1200


def test_a_refused_launch_names_the_kernel_and_the_reason() -> None:
    with without_gpu(FakeDriver(lambda *_: 700)):
        with pytest.raises(JitError, match="sm90_grouped_gemm_fp8_token_ss_128x256' failed: CUDA_ERROR_700"):
            problem("fp8", "dense", "token")()
