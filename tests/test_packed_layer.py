"""A layer whose experts are packed: one copy in memory, and nobody else notices."""

from __future__ import annotations

import copy
import gc
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers_dist import run_ranks
from torch import Tensor

pytest.importorskip("megamoe._host", reason="the C++ engine is not built")

from megamoe.config import MoEConfig
from megamoe.errors import MegaMoeError
from megamoe.functional import MoEContext, mega_moe
from megamoe.layers.experts import is_expert_parallel
from megamoe.layers.moe import MoELayer

FORMATS = ("none", "bf16", "fp8_block", "mxfp4")
QUANTISED = FORMATS[2:]
# 96 is no multiple of 64: packed tensors are larger than canonical ones there
SIZES = [(128, 64), (64, 96)]


def make_layer(
    kind: str, sizes: tuple[int, int] = (128, 64), *, ranks: int = 1, seed: int = 0, **model: Any
) -> MoELayer:
    model = {"num_experts": 8, "top_k": 2, "shared_experts": 1, "expert_bias": True, **model}
    config = MoEConfig.from_dict(
        {
            "model": {
                **model,
                "hidden": sizes[0],
                "intermediate": sizes[1],
                "dtype": "bfloat16" if kind == "bf16" else "float32",
            },
            "router": {"score": "softmax"},
            "quantization": {"weights": "none" if kind == "bf16" else kind},
            "parallel": {"expert_parallel_size": ranks, "timeout_s": 60, "max_tokens_per_rank": 64},
        }
    )
    torch.manual_seed(seed)
    layer = MoELayer(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in layer.experts.named_parameters():
            if name in ("b13", "b2"):
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.1)
            elif kind == "mxfp4":
                # every byte must survive; codes of zeros with any scale, but no NaN
                tensor.copy_(torch.randint(0, 256, tensor.shape, generator=generator, dtype=torch.uint8))
                if name.endswith("_scale"):
                    tensor.copy_(tensor % 8 + 120)
                else:
                    tensor[0] = 0
        if kind == "mxfp4":
            layer.experts.w13_scale[0] = (
                torch.arange(layer.experts.w13_scale[0].numel()).view_as(  # type: ignore[index]
                    layer.experts.w13_scale[0]  # type: ignore[index]
                )
                % 255
            )
    return layer


def as_bytes(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone().contiguous().view(torch.uint8) for name, tensor in state.items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    a, b = as_bytes(a), as_bytes(b)
    return list(a) == list(b) and all(torch.equal(a[name], b[name]) for name in a)


def only_experts(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in state.items() if name.startswith("experts.")}


@torch.no_grad()
def output(layer: MoELayer, seed: int = 3) -> Tensor:
    x = torch.randn(20, layer.spec.hidden, generator=torch.Generator().manual_seed(seed))
    return layer(x.to(layer.experts.w13.dtype if layer.spec.weight_format == "none" else torch.float32))


def packed_layer(kind: str, sizes: tuple[int, int] = (128, 64), **options: Any) -> MoELayer:
    layer = make_layer(kind, sizes, **options).eval().pack_()
    assert layer.experts.layout is not None and layer.experts.w13.dim() == 2
    return layer


def held_bytes() -> int:
    """Bytes of all storages that any tensor of this process holds."""
    gc.collect()
    storages = {}
    for found in gc.get_objects():
        if issubclass(type(found), Tensor) and found.device.type == "cpu":
            try:
                storage = found.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
            except (RuntimeError, NotImplementedError):
                continue  # a compiler's stand-in, without memory
    return sum(storages.values())


@pytest.mark.parametrize("kind", QUANTISED)
def test_the_first_call_leaves_one_copy(kind: str) -> None:
    output(make_layer(kind))  # whatever is made once is there
    empty = held_bytes()
    layer = make_layer(kind)
    canonical = held_bytes() - empty
    experts = sum(p.nbytes for p in layer.experts.parameters())
    assert canonical >= experts > 8 * 3 * 128 * 64 / 2
    state = as_bytes(layer.state_dict())
    y = output(layer)
    assert layer.experts.layout is not None
    del state
    after = held_bytes() - empty - y.nbytes
    print(f"{kind}: experts {experts} bytes, layer {canonical} before and {after} after the first call")
    assert after == canonical
    layer.unpack_()
    assert held_bytes() - empty - y.nbytes == canonical


@pytest.mark.parametrize("kind", ["none", "bf16"])
def test_packing_on_request_lets_the_copy_of_an_earlier_call_go(kind: str) -> None:
    output(packed_layer(kind))
    empty = held_bytes()
    layer = make_layer(kind, expert_bias=False).eval()
    canonical = held_bytes() - empty
    y = output(layer)
    assert layer.experts.layout is None, "not quantised: packed on request alone"
    assert held_bytes() - empty > 1.5 * canonical, "the backend's own copy"
    layer.pack_()
    assert torch.equal(output(layer), y)
    assert held_bytes() - empty - y.nbytes == canonical


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("kind", FORMATS)
def test_state_dict_is_the_same_byte_for_byte(kind: str, sizes: tuple[int, int]) -> None:
    layer = make_layer(kind, sizes).eval()
    state, before = layer.state_dict(), as_bytes(layer.state_dict())
    layer.auto_pack = False
    y = output(layer)
    assert layer.experts.layout is None
    layer.pack_()
    assert torch.equal(output(layer), y)
    assert same(layer.state_dict(), before)
    assert same(state, before), "a state dict that was taken before keeps its values"
    assert all(is_expert_parallel(p) for p in layer.experts.parameters())
    assert "packed as cpu" in repr(layer)
    weights = layer.experts.weights(2, 4)
    assert weights.num_experts == 2 and torch.equal(weights.w2.view(torch.uint8), before["experts.w2"][2:4])
    layer.unpack_()
    assert same(dict(layer.named_parameters()), before) and torch.equal(output(layer), y)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("kind", FORMATS)
def test_loading_writes_into_the_packed_memory(kind: str, sizes: tuple[int, int], tmp_path: Path) -> None:
    other, layer = make_layer(kind, sizes, seed=1).eval(), packed_layer(kind, sizes)
    expected = output(other)
    assert not torch.equal(output(layer), expected)
    addresses = [p.data_ptr() for p in layer.parameters()]
    torch.save(other.state_dict(), tmp_path / "state.pt")
    result = layer.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert not result.missing_keys and not result.unexpected_keys
    assert addresses == [p.data_ptr() for p in layer.parameters()]
    assert torch.equal(output(layer), expected) and same(layer.state_dict(), other.state_dict())


def test_loading_a_part_or_nonsense_leaves_the_rest() -> None:
    layer, other = packed_layer("mxfp4"), make_layer("mxfp4", seed=1)
    before, new = as_bytes(layer.state_dict()), other.state_dict()
    part = {"experts.w2": new["experts.w2"]}
    assert "experts.w13" in layer.load_state_dict(part, strict=False).missing_keys
    assert same(layer.state_dict(), {**before, "experts.w2": new["experts.w2"]})
    with pytest.raises(RuntimeError, match=r"size mismatch for experts.w13: .*\[7, 128, 64\].*\[8, 128, 64\]"):
        layer.load_state_dict({**new, "experts.w13": new["experts.w13"][:7]})
    assert same(layer.state_dict(), {**new, "experts.w13": before["experts.w13"]})


def test_assigned_tensors_stay_the_callers() -> None:
    source, layer = make_layer("mxfp4", seed=1), packed_layer("mxfp4")
    state = {name: tensor.clone() for name, tensor in source.state_dict().items()}
    layer.load_state_dict(state, assign=True)
    assert torch.equal(output(layer), output(make_layer("mxfp4", seed=1)))
    fresh = make_layer("mxfp4")
    fresh.load_state_dict(state, assign=True)
    output(fresh)
    assert fresh.experts.layout is not None and same(state, make_layer("mxfp4", seed=1).state_dict())


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("kind", FORMATS)
def test_load_expert_refreshes_packed_weights_in_place(kind: str, sizes: tuple[int, int]) -> None:
    layer, plain = packed_layer(kind, sizes), make_layer(kind, sizes).eval()
    plain.auto_pack = False
    addresses = [p.data_ptr() for p in layer.experts.parameters()]
    generator = torch.Generator().manual_seed(5)
    hidden, intermediate = sizes
    for expert, shapes in (
        (3, {"w13": (2 * intermediate, hidden), "w2": (hidden, intermediate), "b13": (2 * intermediate,)}),
        (5, {"w2": (hidden, intermediate)}),
        (6, {"b2": (hidden,)}),
    ):
        new = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        for one in (layer, plain):
            one.load_expert(expert, **new)
        assert same(layer.state_dict(), plain.state_dict())
        assert torch.equal(output(layer), output(plain)), "the biases too, which have FP32 copies"
    assert addresses == [p.data_ptr() for p in layer.experts.parameters()]
    with pytest.raises(ValueError, match=r"w2: expected .*, got \[1, 2\]"):
        layer.load_expert(2, w2=torch.zeros(1, 2))
    layer.reset_parameters(seed=9)
    plain.reset_parameters(seed=9)
    assert same(layer.state_dict(), plain.state_dict()) and layer.experts.layout is not None


@pytest.mark.parametrize("kind", FORMATS)
def test_copies(kind: str, tmp_path: Path) -> None:
    layer = packed_layer(kind)
    y, before = output(layer), as_bytes(layer.state_dict())
    twin = copy.deepcopy(layer)
    torch.save(layer.experts, tmp_path / "experts.pt")
    experts = torch.load(tmp_path / "experts.pt", weights_only=False)
    for other in (twin.experts, experts):
        assert other.layout.layout_id == "cpu" and all(is_expert_parallel(p) for p in other.parameters())
        assert same({f"experts.{name}": tensor for name, tensor in other.state_dict().items()}, only_experts(before))
    assert torch.equal(output(twin), y)
    with torch.no_grad():
        for index in range(8):
            twin.load_expert(index, w2=torch.zeros(128, 64))
    assert torch.equal(output(layer), y) and not torch.equal(output(twin), y)


@pytest.mark.parametrize("kind", QUANTISED)
def test_casts_and_other_devices(kind: str) -> None:
    layer = packed_layer(kind)
    before, y = as_bytes(layer.experts.state_dict()), output(layer)
    layer.to(torch.bfloat16)
    layer.to("cpu")
    assert layer.experts.layout is not None and same(layer.experts.state_dict(), before)
    meta = copy.deepcopy(layer).to("meta")
    assert meta.experts.layout is None and meta.experts.w13.shape == before["w13"].shape
    back = meta.to_empty(device="cpu").to(torch.float32)
    back.load_state_dict(layer.state_dict())
    back.router.reset_load()
    assert torch.isfinite(output(back)).all() and same(back.experts.state_dict(), before)
    # the router and the shared experts have been through BF16
    torch.testing.assert_close(output(back), y, rtol=0.1, atol=0.1 * float(y.abs().max()))


def test_casting_weights_that_are_not_quantised() -> None:
    layer, plain = packed_layer("none"), make_layer("none").eval()
    layer.to(torch.bfloat16)
    plain.to(torch.bfloat16)
    assert layer.experts.layout is None and same(layer.state_dict(), plain.state_dict())
    assert torch.equal(output(layer.pack_()), output(plain))


@pytest.mark.parametrize("kind", ["none", "bf16"])
def test_training_has_the_canonical_weights(kind: str) -> None:
    layer, plain = packed_layer(kind), make_layer(kind)
    parameters = dict(layer.named_parameters())
    with pytest.raises(MegaMoeError, match="pack_: training needs the canonical weights"):
        make_layer(kind).pack_()
    layer.train()
    assert layer.experts.layout is None and same(parameters, dict(plain.named_parameters()))
    layer.eval().pack_()
    # without train(): the call that a gradient is asked of
    gradients = []
    for one in (layer, plain):
        x = torch.randn(12, 128, generator=torch.Generator().manual_seed(1)).to(one.experts.w13.dtype)
        one(x).float().square().sum().backward()
        gradients.append({name: p.grad for name, p in one.named_parameters()})
    assert layer.experts.layout is None and same(*gradients)
    assert all(p is parameters[name] for name, p in layer.named_parameters()), "an optimizer's parameters are the same"
    # parameters with a gradient may be packed, and come back
    assert torch.equal(output(layer.pack_()), output(plain.eval()))
    layer.train()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    optimizer.step()
    assert not torch.equal(output(layer), output(plain))


def test_a_backward_after_packing_is_refused_by_name() -> None:
    layer = make_layer("none").eval()
    loss = layer(torch.randn(4, 128)).sum()
    layer.pack_()
    with pytest.raises((ValueError, RuntimeError), match="packed for another backend|modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("kind", FORMATS)
def test_the_reference_backend_on_packed_weights(kind: str) -> None:
    """Case C21: a layer unpacks on demand, the op refuses by name; every path gives the same answer."""
    layer, plain = packed_layer(kind), make_layer(kind).eval()
    y = output(layer)
    reference = MoEContext(layer.spec, None, "reference", device="cpu", max_tokens_per_rank=64)
    x, ids, weights = torch.randn(3, 128), torch.tensor([[0, 1]] * 3), torch.ones(3, 2)
    for check in (False, True):
        other = MoEContext(layer.spec, None, "reference", device="cpu", max_tokens_per_rank=64, check=check)
        with pytest.raises(ValueError, match="weights: packed for another backend, the backend reference reads"):
            mega_moe(x, ids, weights, layer.experts.operands(), other)
    mega_moe(x, ids, weights, layer.experts.weights(), reference)
    checked = MoEContext(layer.spec, None, "cpu", device="cpu", max_tokens_per_rank=64, check=True)
    own = mega_moe(x, ids, weights, layer.experts.operands(), checked)
    assert torch.equal(own, mega_moe(x, ids, weights, layer.experts.weights(), checked))
    layer.context = reference
    assert layer.pack_().experts.layout is not None, "packed already: left alone"
    torch.testing.assert_close(output(layer), y, rtol=2e-2, atol=2e-2 * float(y.abs().max()))
    assert layer.experts.layout is None and same(layer.state_dict(), plain.state_dict())
    assert layer.pack_().experts.layout is None, "this backend has no layout of its own"


def test_compiled_layers_take_packed_weights() -> None:
    layer = packed_layer("mxfp4")
    y = output(layer)
    with torch.no_grad():
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        x = torch.randn(20, 128, generator=torch.Generator().manual_seed(3))
        assert torch.equal(compiled(x), y)
        layer.unpack_()
        assert torch.equal(compiled(x), y) and layer.experts.layout is None, "a graph packs nothing by itself"


def test_functional_call_leaves_the_callers_tensors_alone() -> None:
    layer, other = make_layer("mxfp4"), make_layer("mxfp4", seed=1)
    expected = output(other)
    other.unpack_()
    state = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    x = torch.randn(20, 128, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        for _ in range(2):  # canonical at first, packed later
            assert torch.equal(torch.func.functional_call(layer, state, (x,)), expected)
            assert same(state, other.state_dict())
            output(layer)


def on_two_ranks(rank: int, world_size: int, folder: str) -> dict[str, dict[str, Tensor]]:
    results = {}
    for kind in ("none", "mxfp4"):
        layer = make_layer(kind, ranks=world_size, seed=rank).eval().pack_()
        before, y = as_bytes(layer.state_dict()), output(layer, seed=rank)
        dcp.save(layer.distributed_state_dict(), checkpoint_id=f"{folder}/{kind}")
        other = make_layer(kind, ranks=world_size, seed=50 + rank).eval().pack_()
        addresses = [p.data_ptr() for p in other.parameters()]
        state = other.distributed_state_dict()
        dcp.load(state, checkpoint_id=f"{folder}/{kind}")
        assert not same(only_experts(other.state_dict()), only_experts(before))
        other.load_distributed_state_dict(state)
        assert same(only_experts(other.state_dict()), only_experts(before))
        assert addresses == [p.data_ptr() for p in other.parameters()]
        # the replicated tensors are those of the rank that wrote them
        other.load_state_dict(layer.state_dict())
        assert torch.equal(output(other, seed=rank), y)
        results[kind] = only_experts(before)
    return results


def test_a_distributed_checkpoint_of_packed_layers(tmp_path: Path) -> None:
    two = run_ranks(2, "test_packed_layer:on_two_ranks", str(tmp_path))
    for kind in ("none", "mxfp4"):
        layer = packed_layer(kind, seed=9)
        state = layer.distributed_state_dict()
        dcp.load(state, checkpoint_id=str(tmp_path / kind), no_dist=True)
        layer.load_distributed_state_dict(state)
        for name, tensor in only_experts(as_bytes(layer.state_dict())).items():
            assert torch.equal(tensor, torch.cat([rank[kind][name] for rank in two])), (kind, name)


def test_an_interrupted_packing_is_finished_by_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = make_layer("mxfp4").eval(), torch.randn(12, 128)
    with torch.no_grad():
        layer.auto_pack = False
        expected = layer(x)
        layer.auto_pack = True
        put, calls = layer.experts._put, []

        def interrupted(name: str, *tensors: Any) -> None:
            calls.append(name)
            if len(calls) == 2:
                raise KeyboardInterrupt
            put(name, *tensors)

        monkeypatch.setattr(layer.experts, "_put", interrupted)
        with pytest.raises(KeyboardInterrupt):
            layer(x)
        monkeypatch.undo()
        assert layer.experts.w13.dim() == 2 and layer.experts.w2.dim() == 3
        assert torch.equal(layer(x), expected)


def test_layers_with_the_same_parameters_pack_them_once() -> None:
    first, second, x = make_layer("mxfp4").eval(), make_layer("mxfp4", seed=1).eval(), torch.randn(12, 128)
    for name in ("w13", "w2", "w13_scale", "w2_scale", "b13", "b2"):
        second.experts._parameters[name] = first.experts._parameters[name]
    with torch.no_grad():
        second.auto_pack = False
        expected = second(x)
        second.auto_pack = True
        first(x)
        assert torch.equal(second(x), expected)


def test_threads_pack_once() -> None:
    layer, x = make_layer("mxfp4").eval(), torch.randn(12, 128)
    with torch.no_grad():
        layer.auto_pack = False
        expected = layer(x)
    layout = layer.context.backend.layout
    threads = [threading.Thread(target=layer.experts.pack_, args=(layout,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with torch.no_grad():
        assert torch.equal(layer(x), expected)


def test_canonical_tensors_put_into_a_packed_layer_are_kept_as_they_are() -> None:
    layer, x = make_layer("mxfp4").eval(), torch.randn(12, 128)
    other = make_layer("mxfp4", seed=1).state_dict()
    with torch.no_grad():
        layer(x)
        for name in ("w13", "w2", "w13_scale", "w2_scale"):
            getattr(layer.experts, name).data = other[f"experts.{name}"].clone()
        for name in ("w13", "w2", "w13_scale", "w2_scale"):
            assert torch.equal(layer.state_dict()[f"experts.{name}"], other[f"experts.{name}"])


def test_what_cannot_be_packed_is_refused_in_one_sentence() -> None:
    layer, x = make_layer("mxfp4").eval(), torch.randn(12, 128)
    state = layer.state_dict()
    with torch.no_grad():
        layer.load_state_dict({**state, "experts.w13": state["experts.w13"].double()}, assign=True)
        with pytest.raises(ValueError, match="w13: expected uint8"):
            layer(x)
        layer.load_state_dict(state, assign=True)
        layer(x)
        with pytest.raises(ValueError, match="made of plain CPU tensors, got Tensor on meta"):
            layer.load_state_dict({name: value.to("meta") for name, value in state.items()}, assign=True)
    half = make_layer("none").half().eval()
    with pytest.raises(ValueError, match="expected (bfloat16|float32).*float16|takes bfloat16 or float32"):
        half.pack_()
