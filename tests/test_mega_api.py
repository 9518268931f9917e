"""DeepGEMM's names over the mega-kernel, without a GPU: views, sizes, weights, refusals, and its own usage block."""

from __future__ import annotations

import gc
import inspect
import re
from typing import Any

import pytest
import torch

pytest.importorskip("megamoe._host", reason="the C++ engine is not built")

from helpers_mega import FakeGpu, FakePlan, record_launches  # noqa: E402
from helpers_packing import random_experts  # noqa: E402

import megamoe  # noqa: E402
import megamoe.backends.sm90 as sm90  # noqa: E402
import megamoe.mega as mega  # noqa: E402
from megamoe.errors import BackendUnavailable, ConfigError  # noqa: E402
from megamoe.kernels.formats import ue8m0_decode  # noqa: E402
from megamoe.kernels.mega_moe import published_row_bytes  # noqa: E402
from megamoe.kernels.packing.moe import pack_moe_experts  # noqa: E402
from megamoe.mega import SymmBuffer  # noqa: E402

E, T, K, H, I = 8, 40, 2, 256, 320  # noqa: E741
Tensor = torch.Tensor


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    """Nothing is launched; what the kernel itself does not do is refused as on a GPU."""
    monkeypatch.setattr(mega.Sm90Backend, "unavailable", lambda spec, device, world: sm90.unsupported(spec, world))
    return record_launches(monkeypatch)


def make_buffer(**options: Any) -> SymmBuffer:
    options = {"act_scale": "token", "device": "cpu", **options}
    return mega.get_symm_buffer_for_mega_moe(None, E, T, K, H, I, **options)


def make_weights(seed: int = 0) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    return random_experts(E, 2 * I, H, seed=seed), random_experts(E, H, I, seed=seed + 1)


def test_names_order_and_defaults_are_the_public_ones() -> None:
    def positional(function: Any) -> list[tuple[str, Any]]:
        found = inspect.signature(function).parameters.values()
        return [(p.name, None if p.default is p.empty else p.default) for p in found if p.kind != p.KEYWORD_ONLY]

    assert positional(megamoe.get_symm_buffer_for_mega_moe) == [
        ("group", None),
        ("num_experts", None),
        ("num_max_tokens_per_rank", None),
        ("num_topk", None),
        ("hidden", None),
        ("intermediate_hidden", None),
        ("use_fp8_dispatch", None),
        ("mma_type", "fp8xfp4"),
        ("activation", "swiglu"),
    ]
    assert positional(megamoe.transform_weights_for_mega_moe) == [
        ("l1_weights", None),
        ("l2_weights", None),
        ("activation", "swiglu"),
    ]
    assert positional(megamoe.fp8_fp4_mega_moe) == [
        ("y", None),
        ("l1_weights", None),
        ("l2_weights", None),
        ("sym_buffer", None),
        ("cumulative_local_expert_recv_stats", None),
        ("recipe", (1, 1, 32)),
        ("activation", "swiglu"),
        ("activation_clamp", None),
        ("fast_math", True),
    ]
    tensor = torch.zeros(3)
    assert megamoe.localize(tensor) is tensor and megamoe.destroy_localizer() is None


@pytest.mark.parametrize("act_scale", ["token", "block128"])
def test_the_usage_block(gpu: FakeGpu, act_scale: str) -> None:
    """The steps of DeepGEMM's README with the import changed, and the same with one scale a token."""
    deep_gemm: Any = megamoe
    num_tokens, scales = 33, 1 if act_scale == "token" else H // 128
    option: dict[str, str] = {"act_scale": "token"} if act_scale == "token" else {}
    l1_weights, l2_weights = make_weights()
    x_fp8 = torch.randn(num_tokens, H).to(torch.float8_e4m3fn)
    x_sf = torch.rand(num_tokens, scales) + 0.5
    topk_idx = torch.randint(0, E, (num_tokens, K))
    topk_weights = torch.rand(num_tokens, K)

    buffer = deep_gemm.get_symm_buffer_for_mega_moe(None, E, T, K, H, I, **option, device="cpu")
    transformed_l1, transformed_l2 = deep_gemm.transform_weights_for_mega_moe(l1_weights, l2_weights)
    buffer.x[:num_tokens].copy_(x_fp8)
    buffer.x_sf[:num_tokens].copy_(x_sf)
    buffer.topk_idx[:num_tokens].copy_(topk_idx)
    buffer.topk_weights[:num_tokens].copy_(topk_weights)
    y = torch.empty((num_tokens, H), dtype=torch.bfloat16)
    deep_gemm.fp8_fp4_mega_moe(y, transformed_l1, transformed_l2, buffer)

    (call,) = FakePlan.launches
    plan = call["plan"]
    assert call["x"] is None and call["out"] is y and call["received"] is None
    assert torch.equal(call["ids"], topk_idx) and torch.equal(call["weights"], topk_weights)
    spec = plan.spec
    assert (spec.activation, spec.swiglu_limit, spec.weight_position) == ("silu", None, "before")
    assert (spec.weight_format, spec.act_scale, spec.num_experts, spec.top_k) == ("mxfp4", act_scale, E, K)
    # what the kernel finds in the workspace
    numbers = mega.workspace_numbers(spec, buffer.workspace.limits)
    rows = buffer.buffer[numbers["input"] :][: num_tokens * H].view(torch.float8_e4m3fn).view(num_tokens, H)
    assert torch.equal(rows.view(torch.uint8), x_fp8.view(torch.uint8))
    row_bytes = published_row_bytes(spec)[1]
    found = buffer.buffer[numbers["scales"] :][: num_tokens * row_bytes].view(torch.float32)
    assert torch.equal(found.view(num_tokens, -1)[:, :scales], x_sf)
    expected = pack_moe_experts(*l1_weights, *l2_weights)
    assert torch.equal(plan.experts.w13.data, expected.w13.data)
    assert torch.equal(plan.experts.w2.row_scale, expected.w2.row_scale)
    assert plan.experts.w13.rows == expected.w13.rows and plan.experts.w2.columns == I


def test_bytes_are_known_beforehand(gpu: FakeGpu) -> None:
    nbytes = megamoe.get_symm_buffer_size_for_mega_moe(1, E, T, K, H, I, act_scale="token")
    buffer = make_buffer()
    assert buffer.nbytes == nbytes == buffer.buffer.numel()
    assert megamoe.get_symm_buffer_size_for_mega_moe(8, 256, 8192, 6, 4096, 2048) > nbytes


@pytest.mark.parametrize(
    ("place", "number", "words"),
    [
        (0, 0, "num_ranks: must be a whole number of 1 or more, got 0"),
        (0, 3, "num_experts: must be a multiple of the 3 ranks, at most 256 on each, got 256"),
        (1, -8, "num_experts: must be a whole number of 1 or more, got -8"),
        (1, 8192, "num_experts: must be a multiple of the 8 ranks, at most 256 on each, got 8192"),
        (2, 0, "num_max_tokens_per_rank: must be a whole number of 1 or more, got 0"),
        (2, 4.5, "num_max_tokens_per_rank: must be a whole number of 1 or more, got 4.5"),
        (3, 17, "num_topk: must be at most 16 of 256 experts, got 17"),
        (4, 100, "hidden: must be a multiple of 32, got 100"),
        (5, 40, "intermediate_hidden: must be a multiple of 32, got 40"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(place: int, number: Any, words: str) -> None:
    numbers: list[Any] = [8, 256, 8192, 6, 4096, 2048]
    assert megamoe.get_symm_buffer_size_for_mega_moe(*numbers) > 0
    numbers[place] = number
    with pytest.raises(ConfigError, match=re.escape(words)):
        megamoe.get_symm_buffer_size_for_mega_moe(*numbers)
    if place:
        with pytest.raises(ConfigError, match=words.split(":")[0]):
            megamoe.get_symm_buffer_for_mega_moe(None, *(numbers[1:] if place > 1 else [8192, *numbers[2:]]))


def test_views(gpu: FakeGpu) -> None:
    buffer = make_buffer()
    assert buffer.x.shape == (T, H) and buffer.x.dtype == torch.float8_e4m3fn
    assert buffer.x_sf.shape == (T, 1) and buffer.x_sf.dtype == torch.float32
    assert buffer.topk_idx.shape == buffer.topk_weights.shape == (T, K)
    assert buffer.topk_idx.dtype == torch.int64 and bool((buffer.topk_idx == -1).all())
    assert buffer.x.data_ptr() % 16 == 0 and buffer.x_sf.data_ptr() % 16 == 0
    buffer.x_sf[:3].copy_(torch.full((3, 1), 0.5))
    assert float(buffer.x_sf.sum()) == 1.5
    with pytest.raises(TypeError, match="x_sf: expected FP32 scales, got torch.int32; packed UE8M0 scales are not"):
        buffer.x_sf[:3].copy_(torch.full((3, 1), 0x7F7F7F7F, dtype=torch.int32))
    buffer.destroy()


def test_every_form_of_the_scales_packs_to_the_same_bytes() -> None:
    (codes, scales), l2 = make_weights()
    expected = megamoe.transform_weights_for_mega_moe((codes, scales), l2)
    forms = {
        "e8m0": scales.view(torch.float8_e8m0fnu),
        "fp32": ue8m0_decode(scales),
        "int32": scales.contiguous().view(torch.int32),
        "int32, columns first": scales.contiguous().view(torch.int32).transpose(1, 2).contiguous().transpose(1, 2),
    }
    for name, form in forms.items():
        got = megamoe.transform_weights_for_mega_moe((codes.view(torch.int8), form), l2)
        for a, b in zip((*got[0], *got[1]), (*expected[0], *expected[1]), strict=True):
            assert torch.equal(a, b), name


def test_words_packed_by_four_may_end_in_the_middle() -> None:
    (codes, scales), (codes2, scales2) = make_weights()  # I / 32 = 10 bytes a row: two and a half words
    padded = torch.nn.functional.pad(scales2, (0, 2), value=3).view(torch.int32)
    got = megamoe.transform_weights_for_mega_moe((codes, scales), (codes2, padded))
    expected = megamoe.transform_weights_for_mega_moe((codes, scales), (codes2, scales2))
    assert torch.equal(got[1][0], expected[1][0]) and torch.equal(got[1][1], expected[1][1])


def test_weights_that_are_refused() -> None:
    l1, l2 = make_weights()
    cases: list[tuple[Any, Any, type[Exception], str]] = [
        (torch.zeros(E, 2 * I, H, dtype=torch.bfloat16), l2, TypeError, "l1_weights: .*torch.bfloat16 alone; weights"),
        ((l1[0].view(torch.float8_e4m3fn), l1[1]), l2, TypeError, "l1_weights: expected MXFP4 codes in torch.uint8"),
        (l1, (l2[0], l2[1].long()), TypeError, "l2_weights: expected UE8M0 scales in .* got torch.int64"),
        (l1, (l2[0], l2[1][:, :, :4]), ValueError, r"l2_weights: codes .* need scales \[8, 256, 10\], got"),
        ((l1[0], torch.full(l1[1].shape, 1.3)), l2, ValueError, "a UE8M0 scale must be a power of two .* got 1.2"),
        (l1, l1, ValueError, "w13, w2: expected"),
    ]
    for first, second, error, words in cases:
        with pytest.raises(error, match=words):
            megamoe.transform_weights_for_mega_moe(first, second)
    with pytest.raises(ValueError, match="activation: must be 'swiglu', got 'situ'"):
        megamoe.transform_weights_for_mega_moe(l1, l2, activation="situ")


def test_buffers_that_are_refused(gpu: FakeGpu) -> None:
    for options, words in (
        ({"mma_type": "bf16xbf16"}, "mma_type: must be 'fp8xfp4', got 'bf16xbf16'"),
        ({"activation": "geglu"}, "activation: must be 'swiglu', got 'geglu'"),
        ({"use_fp8_dispatch": False}, "use_fp8_dispatch: tokens travel as E4M3"),
        ({"act_scale": "none"}, "act_scale: must be 'token' or 'block128', got 'none'"),
    ):
        with pytest.raises(ValueError, match=words):
            make_buffer(**options)
    make_buffer(use_fp8_dispatch=True)
    with pytest.raises(ConfigError, match="^hidden: must be a multiple of 32, got 100"):
        mega.get_symm_buffer_for_mega_moe(None, E, T, K, 100, I, act_scale="token", device="cpu")


def test_a_gpu_that_is_not_hopper_is_refused() -> None:
    with pytest.raises(BackendUnavailable, match="mega_moe: the kernel cannot run here: it runs on NVIDIA Hopper GPUs"):
        make_buffer()


def test_calls_that_are_refused(gpu: FakeGpu) -> None:
    buffer = make_buffer()
    l1, l2 = megamoe.transform_weights_for_mega_moe(*make_weights())
    y = torch.empty(5, H, dtype=torch.bfloat16)
    wrong_stats = torch.zeros(E - 1, dtype=torch.int32)
    calls: list[tuple[Any, Any, Any, dict[str, Any], str]] = [
        (y.float(), l1, l2, {}, r"y: must be torch.bfloat16 \[num_tokens, 256\] with at most 40 tokens"),
        (torch.empty(41, H, dtype=torch.bfloat16), l1, l2, {}, r"at most 40 tokens, got torch.bfloat16 \[41, 256\]"),
        (torch.empty(5, 2 * H, dtype=torch.bfloat16)[:, ::2], l1, l2, {}, "y: must be contiguous, aligned to 16 bytes"),
        (y, l1, l2, {"recipe": (1, 128, 128)}, r"recipe: must be \(1, 1, 32\), .*got \(1, 128, 128\)"),
        (y, l1, l2, {"activation": "geglu"}, "activation: must be 'swiglu'"),
        (
            y,
            l1,
            l2,
            {"cumulative_local_expert_recv_stats": wrong_stats},
            r"cumulative_local_expert_recv_stats: must be torch.int32 \[8\]",
        ),
        (y, l2, l1, {}, "l1_weights: expected transform_weights_for_mega_moe's uint8"),
        (y, (l1[0][:, :, :, ::1].transpose(0, 1).contiguous().transpose(0, 1), l1[1]), l2, {}, "must be contiguous"),
    ]
    for out, first, second, options, words in calls:
        with pytest.raises(ValueError, match=words):
            megamoe.fp8_fp4_mega_moe(out, first, second, buffer, **options)
    assert FakePlan.launches == []


def test_statistics_and_clamp_reach_the_kernel(gpu: FakeGpu) -> None:
    buffer = make_buffer()
    l1, l2 = megamoe.transform_weights_for_mega_moe(*make_weights())
    y, stats = torch.empty(5, H, dtype=torch.bfloat16), torch.zeros(E, dtype=torch.int32)
    megamoe.fp8_fp4_mega_moe(y, l1, l2, buffer, stats, activation_clamp=10.0, fast_math=False)
    megamoe.fp8_fp4_mega_moe(y[:0], l1, l2, buffer, stats, activation_clamp=10.0)
    megamoe.fp8_fp4_mega_moe(y, l1, l2, buffer)
    clamped, empty, plain = FakePlan.launches
    assert clamped["received"] is stats and plain["received"] is None and len(empty["ids"]) == 0
    assert clamped["plan"] is empty["plan"] is not plain["plan"]
    spec = clamped["plan"].spec
    assert (spec.activation, spec.swiglu_limit) == ("swiglu_clamp", 10.0) and plain["plan"].spec.activation == "silu"


def test_plans_go_with_their_weights(gpu: FakeGpu) -> None:
    buffer, y = make_buffer(), torch.empty(5, H, dtype=torch.bfloat16)
    kept = megamoe.transform_weights_for_mega_moe(*make_weights())
    for seed in range(4):
        dropped = megamoe.transform_weights_for_mega_moe(*make_weights(seed))
        for l1, l2 in (kept, dropped):
            megamoe.fp8_fp4_mega_moe(y, l1, l2, buffer)
    del dropped, l1, l2
    FakePlan.made.clear()
    FakePlan.launches.clear()
    gc.collect()
    assert len(buffer._plans) == 1


def test_weights_that_are_not_a_pair_of_the_right_sizes() -> None:
    codes, scales = torch.zeros(2, 256, 128, dtype=torch.uint8), torch.full((2, 256, 8), 127, dtype=torch.uint8)
    second = torch.zeros(2, 256, 64, dtype=torch.uint8), torch.full((2, 256, 4), 127, dtype=torch.uint8)
    for wrong in (None, (codes,), (codes, scales, scales), (codes, None), (codes[0], scales[0])):
        with pytest.raises(TypeError, match=r"l1_weights: expected \(codes, scales\)"):
            megamoe.transform_weights_for_mega_moe(wrong, second)
    for dtype in (torch.uint8, torch.int32):  # more than a word has to spare
        wide = torch.full((2, 256, 48), 127, dtype=torch.uint8).view(dtype)
        with pytest.raises(ValueError, match=r"l1_weights: codes \[2, 256, 128\] need scales \[2, 256, 8\]"):
            megamoe.transform_weights_for_mega_moe((codes, wide), second)


def test_a_buffer_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BackendUnavailable, match="torch finds no CUDA device"):
        megamoe.get_symm_buffer_for_mega_moe(None, 4, 64, 2, 256, 128)
