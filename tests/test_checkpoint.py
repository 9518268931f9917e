"""Checkpoints: the local state dict, and a torch.distributed.checkpoint that changes the number of ranks."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from helpers_dist import run_ranks
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from megamoe.config import MoEConfig
from megamoe.layers.moe import MoELayer

FORMATS = ("none", "bf16", "fp8_block", "mxfp4")
TOKENS = 24


def make_layer(kind: str, ranks: int, *, seed: int, group: Any = None) -> MoELayer:
    """Build a layer with every kind of tensor in it."""
    config = MoEConfig.from_dict(
        {
            "model": {
                "hidden": 64,
                "intermediate": 96,
                "num_experts": 8,
                "top_k": 2,
                "dtype": "bfloat16" if kind == "bf16" else "float32",
                "shared_experts": 1,
                "expert_bias": True,
            },
            "router": {"score": "sigmoid", "bias": True},
            "quantization": {"weights": "none" if kind == "bf16" else kind},
            "parallel": {"expert_parallel_size": ranks, "timeout_s": 60},
        }
    )
    torch.manual_seed(seed)
    layer = MoELayer(config, group)
    with torch.no_grad():
        for name, tensor in layer.state_dict().items():
            # biases start as zeros, which would hide that they were not loaded
            if "b13" in name or "b2" in name or "bias" in name:
                tensor.copy_(torch.randn(tensor.shape) * 0.1)
    return layer


def output(layer: MoELayer, rank: int, ranks: int) -> Tensor:
    x = torch.randn(TOKENS, 64, generator=torch.Generator().manual_seed(3)).chunk(ranks)[rank]
    with torch.no_grad():
        return layer(x.to(layer.experts.b13.dtype)).float()  # type: ignore[union-attr]


def as_bytes(layer: MoELayer) -> dict[str, Tensor]:
    return {name: tensor.detach().clone().view(torch.uint8) for name, tensor in layer.state_dict().items()}


def whole(shares: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Put the experts of all ranks together; everything else must be equal on every rank."""
    state = {}
    for name, first in shares[0].items():
        if name.startswith("experts."):
            state[name] = torch.cat([share[name] for share in shares])
        else:
            assert all(torch.equal(first, share[name]) for share in shares), name
            state[name] = first
    return state


def save_on_rank(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    results = {}
    for kind in FORMATS:
        # replicated parameters come from rank 0's generator, the experts' biases from each rank's
        layer = make_layer(kind, world_size, seed=rank)
        for name, tensor in layer.state_dict().items():
            if name == "router.e_score_correction_bias":
                dist.broadcast(tensor, 0)
        dcp.save(layer.distributed_state_dict(), checkpoint_id=f"{folder}/{kind}")
        results[kind] = {"state": as_bytes(layer), "y": output(layer, rank, world_size)}
    # two replicas of a layer on two ranks each write one checkpoint together
    replica = make_layer("mxfp4", 2, seed=rank % 2)
    for name, tensor in replica.state_dict().items():
        if name == "router.e_score_correction_bias":
            dist.broadcast(tensor, 0)
    dcp.save(replica.distributed_state_dict(), checkpoint_id=f"{folder}/replicas")
    results["replicas"] = {"state": as_bytes(replica)}
    results["initial"] = initial_values(rank, world_size)
    return results


def load_on_rank(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    results = {}
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("ep",))
    for kind in FORMATS:
        layer = make_layer(kind, world_size, seed=100 + rank, group=mesh if kind == "mxfp4" else None)
        addresses = {name: tensor.data_ptr() for name, tensor in layer.state_dict().items()}
        before = as_bytes(layer)
        state = layer.distributed_state_dict()
        dcp.load(state, checkpoint_id=f"{folder}/{kind}")
        layer.load_distributed_state_dict(state)
        assert addresses == {name: tensor.data_ptr() for name, tensor in layer.state_dict().items()}
        results[kind] = {"before": before, "state": as_bytes(layer), "y": output(layer, rank, world_size)}
    return results


@cache
def saved() -> tuple[str, list[dict[str, Any]], list[dict[str, Any]]]:
    """Save on four ranks, load on two; return the folder and what both saw."""
    import atexit
    import shutil
    import tempfile

    folder = tempfile.mkdtemp(prefix="megamoe-checkpoint-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    four = run_ranks(4, "test_checkpoint:save_on_rank", folder, timeout_s=120)
    return folder, four, run_ranks(2, "test_checkpoint:load_on_rank", folder, timeout_s=120)


@pytest.mark.parametrize("kind", FORMATS)
def test_saved_on_four_ranks_loads_on_two(kind: str) -> None:
    _, four, two = saved()
    before, after = (whole([rank[kind]["state"] for rank in ranks]) for ranks in (four, two))
    assert set(before) == set(after)
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]), name
        shares = [rank[kind]["before"][name] for rank in two]
        initial = torch.cat(shares) if name.startswith("experts.") else shares[0]
        assert not torch.equal(tensor, initial), f"{name} was equal before loading: the test shows nothing"
    y4, y2 = (torch.cat([rank[kind]["y"] for rank in ranks]) for ranks in (four, two))
    torch.testing.assert_close(y2, y4, rtol=2e-2 if kind == "bf16" else 1e-4, atol=2e-2 if kind == "bf16" else 1e-4)


@pytest.mark.parametrize("kind", FORMATS)
def test_saved_on_four_ranks_loads_without_torch_distributed(kind: str) -> None:
    folder, four, _ = saved()
    layer = make_layer(kind, 1, seed=7)
    state = layer.distributed_state_dict()
    dcp.load(state, checkpoint_id=str(Path(folder) / kind), no_dist=True)
    layer.load_distributed_state_dict(state)
    truth = whole([rank[kind]["state"] for rank in four])
    for name, tensor in as_bytes(layer).items():
        assert torch.equal(tensor, truth[name]), name


@pytest.mark.parametrize("kind", FORMATS)
def test_local_state_dict_round_trip(kind: str, tmp_path: Path) -> None:
    layer, other = make_layer(kind, 1, seed=1), make_layer(kind, 1, seed=2)
    torch.save(layer.state_dict(), tmp_path / "state.pt")
    assert not torch.equal(output(other, 0, 1), output(layer, 0, 1))
    # the parameters: a state dict of packed experts holds canonical copies
    addresses = {name: tensor.data_ptr() for name, tensor in other.named_parameters()}
    result = other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert not result.missing_keys and not result.unexpected_keys
    assert addresses == {name: tensor.data_ptr() for name, tensor in other.named_parameters()}
    for name, tensor in as_bytes(layer).items():
        assert torch.equal(tensor, as_bytes(other)[name]), name
    assert torch.equal(output(other, 0, 1), output(layer, 0, 1))


def test_two_replicas_write_one_checkpoint() -> None:
    folder, four, _ = saved()
    first, second = (whole([four[rank]["replicas"]["state"] for rank in pair]) for pair in ((0, 1), (2, 3)))
    layer = make_layer("mxfp4", 1, seed=7)
    state = layer.distributed_state_dict()
    dcp.load(state, checkpoint_id=str(Path(folder) / "replicas"), no_dist=True)
    for name, tensor in as_bytes(layer).items():
        assert torch.equal(first[name], second[name]) and torch.equal(tensor, first[name]), name


def test_initial_values_do_not_depend_on_the_number_of_ranks() -> None:
    """One seed on rank 0 gives the same layer on 1, 2 and 4 ranks, whatever the other ranks' generators say."""
    _, four, _ = saved()
    alone = initial_values(0, 1)
    for ranks in (4, 2):
        together = whole([four[rank]["initial"][ranks] for rank in range(ranks)])
        for name, tensor in alone[1].items():
            assert torch.equal(tensor, together[name]), (ranks, name)


def initial_values(rank: int, world_size: int) -> dict[int, dict[str, Tensor]]:
    """Return a new layer's parameters for the whole world and for blocks of two ranks."""
    results = {}
    for ranks in {world_size, min(2, world_size)}:
        config = MoEConfig.from_dict(
            {
                "model": {"hidden": 64, "intermediate": 32, "num_experts": 8, "top_k": 2, "shared_experts": 1},
                "router": {"score": "softmax"},
                "quantization": {"weights": "mxfp4"},
                "parallel": {"expert_parallel_size": ranks, "timeout_s": 60},
            }
        )
        # the generators of ranks that are not first in their block must not matter
        torch.manual_seed(5 if rank % ranks == 0 else 50 + rank)
        results[ranks] = as_bytes(MoELayer(config))
    return results
