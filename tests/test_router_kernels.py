"""The router's kernels compile for Hopper without spills; which instance a router gets; where they are not used."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

pytest.importorskip("torch")

import torch  # noqa: E402
from helpers_routing import MENU, hash_router, make, menu  # noqa: E402

from megamoe.config import MoEConfig  # noqa: E402
from megamoe.kernels import eager  # noqa: E402
from megamoe.kernels.eager import is_eager, runs_kernels  # noqa: E402
from megamoe.kernels.jit import JitSettings, KernelSource, build  # noqa: E402
from megamoe.kernels.route import RouteShape, can_route  # noqa: E402
from megamoe.kernels.router_logits import router_logits_sources, takes_logits  # noqa: E402


def check_clean(source: KernelSource, cache: Path) -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="cuda.core with NVRTC is not installed (megamoe[cuda13])")
    usage = build(source, JitSettings(cache_dirs=(cache,))).usage
    assert usage.is_clean, (source.name, usage)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("hidden", [2048, 4096, 6144, 7168, 16384])
def test_logits_kernels_have_no_spills(hidden: int, dtype: torch.dtype, tmp_path: Path) -> None:
    sources = router_logits_sources(hidden, dtype)
    assert len(sources) == 2
    for source in sources:
        check_clean(source, tmp_path)


@menu
def test_routing_kernels_have_no_spills(name: str, tmp_path: Path) -> None:
    for correction in (False, True):
        check_clean(make(name, bias=correction)._shape.source(), tmp_path)


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_hash_kernels_have_no_spills(score: str, tmp_path: Path) -> None:
    for renormalize in (False, True):
        check_clean(hash_router(score=score, renormalize=renormalize)._shape.source(), tmp_path)


@pytest.mark.parametrize("preset", ["deepseek_v4_flash", "deepseek_v3", "gpt_oss_120b", "mixtral_8x7b"])
def test_a_router_has_the_shape_that_is_compiled_ahead(preset: str) -> None:
    config = MoEConfig.from_yaml(preset)
    shape = RouteShape.of(config.router, config.spec.num_experts, config.spec.top_k)
    assert shape.fits and (shape.num_experts, shape.top_k) == (config.spec.num_experts, config.spec.top_k)
    assert not can_route(shape, torch.device("cpu"))


@pytest.mark.parametrize(
    ("capability", "installed", "runs"),
    [
        ((9, 0), ("cuda", "cuda.core"), True),
        ((9, 0), ("cuda",), False),
        ((9, 0), (), False),
        ((10, 0), ("cuda", "cuda.core"), False),
    ],
)
def test_where_kernels_run(
    capability: tuple[int, int], installed: tuple[str, ...], runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the compiler's package torch routes, as it does for the backend `reference` on such a machine."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(eager, "find_spec", lambda name: name if name in installed else None)
    runs_kernels.cache_clear()
    assert runs_kernels(torch.device("cuda", 0)) == runs
    assert not runs_kernels(torch.device("cpu"))
    runs_kernels.cache_clear()


def test_what_no_warp_holds_has_no_kernel() -> None:
    _, _, section = MENU["mixtral"]
    assert RouteShape(1024, 32, section["score"], False, False, 32, 32, "max", True).fits
    for experts, top_k, groups in ((1025, 2, 1), (64, 33, 1), (66, 2, 33)):
        assert not RouteShape(experts, top_k, section["score"], False, False, groups, 1, "max", True).fits


def test_tokens_that_the_kernel_does_not_take() -> None:
    x, weight, bias = torch.zeros(4, 64).bfloat16(), torch.zeros(8, 64), torch.zeros(8)
    assert takes_logits(x, weight, bias) and takes_logits(x, weight.bfloat16(), None)
    assert not takes_logits(x.float(), weight, None)
    assert not takes_logits(x, weight.half(), None)
    assert not takes_logits(x, weight, bias.bfloat16())
    assert not takes_logits(torch.zeros(4, 60).bfloat16(), torch.zeros(8, 60), None)
    assert not takes_logits(torch.zeros(4, 128).bfloat16()[:, ::2], weight, None)
    assert not takes_logits(torch.zeros(64, 4).bfloat16().T, weight, None)
    assert not takes_logits(torch.zeros(4, 72).bfloat16()[:, 1:65], weight, None)
    assert not takes_logits(torch.zeros(1, 64).bfloat16().expand(10_000, 64), weight, None)


def test_what_torch_has_to_see() -> None:
    plain, trained = torch.zeros(3), torch.nn.Parameter(torch.zeros(3))
    assert is_eager(plain, None) and not is_eager(plain, trained)
    with torch.autograd.forward_ad.dual_level():
        assert not is_eager(torch.autograd.forward_ad.make_dual(plain, plain))
    with torch.no_grad():
        assert is_eager(plain, trained)
        assert not is_eager(torch.nn.parameter.UninitializedParameter())
        with torch._subclasses.FakeTensorMode():
            assert not is_eager(plain)
        seen = []
        torch.func.vmap(lambda x: (seen.append(is_eager(plain)), x)[1])(plain)
        torch.compile(lambda x: (seen.append(is_eager(x)), x + 1)[1], backend="eager")(plain)
        assert seen == [False, False]


def test_a_compiler_never_gets_to_ask_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a whole graph asked for it would stop at the search for a package; so the question comes last."""
    monkeypatch.setattr("megamoe.layers.router.is_eager", lambda *tensors: False)

    def refuse(*_: object) -> bool:
        raise AssertionError("asked under a compiler")

    monkeypatch.setattr("megamoe.layers.router.can_route", refuse)
    on_gpu = cast(torch.Tensor, SimpleNamespace(is_cuda=True, device=torch.device("cuda", 0)))
    assert not make("deepseek_v3", hidden=64)._has_kernels(on_gpu, None)


def test_buffers_of_another_dtype_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """`load_state_dict(assign=True)` puts a checkpoint's tensors in place; the kernel reads FP32 and int64."""
    monkeypatch.setattr("megamoe.layers.router.is_eager", lambda *tensors: True)
    monkeypatch.setattr("megamoe.layers.router.can_route", lambda *_: True)
    x, ids = cast(torch.Tensor, SimpleNamespace(is_cuda=True, device=torch.device("cpu"))), torch.zeros(3).long()
    biased, hashed = make("deepseek_v3", hidden=64, bias=True), hash_router()
    for router, name, dtype in (
        (biased, "e_score_correction_bias", torch.bfloat16),
        (hashed, "tid2eid", torch.int32),
    ):
        assert router._has_kernels(x, ids)
        router.load_state_dict({**router.state_dict(), name: getattr(router, name).to(dtype)}, assign=True)
        assert getattr(router, name).dtype == dtype and not router._has_kernels(x, ids)
