"""Job `train`: it learns, it says so only when it did, and its gradients are those of one process."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from helpers_launch import QUICKSTART, SMALL, megamoe
from torch import nn

from megamoe.launch.job_train import MasterAdamW
from megamoe.launch.language_model import ByteLanguageModel
from megamoe.launch.text import load_text, slice_bounds, unigram_entropy

GRADIENTS = """
import dataclasses, os, sys
import torch
from megamoe import MoEConfig
from megamoe.launch import job_train
from megamoe.launch.runtime import Runtime
config = MoEConfig.from_yaml(os.environ["MEGAMOE_CONFIG"])
runtime = Runtime(config)
model = job_train.build_model(config, runtime)
batch = torch.randint(0, 256, (4, 17), generator=torch.Generator().manual_seed(5))
share = 4 // runtime.world_size
mine = batch[runtime.rank * share : (runtime.rank + 1) * share]
loss = job_train.share_of_loss(model, mine[:, :-1], mine[:, 1:], 64)
loss.backward()
job_train.sum_gradients(model, runtime, 60.0)
gradients = {}
for name, parameter in model.named_parameters():
    gradient = parameter.grad
    if ".experts." in name:
        parts = runtime.gather_rows(gradient)
        gradient = torch.cat(parts)
    gradients[name] = gradient.clone()
torch.save(gradients, f"{sys.argv[1]}.{runtime.rank}")
runtime.close()
"""


class Still(nn.Module):
    """Stands for a MoE layer where only the rest of the model is looked at."""

    def forward(self, x: torch.Tensor, input_ids: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x)


def test_the_shipped_text_is_english_prose() -> None:
    text = load_text()
    assert 20_000 < len(text) < 80_000 and text.isascii()
    assert 2.8 < unigram_entropy(text) < 3.2, "nats per byte of English with punctuation"
    lines = [line for line in text.splitlines() if line]
    assert len(set(lines)) == len(lines)


def test_entropy_of_known_texts() -> None:
    assert unigram_entropy(b"aaaa") == 0
    assert unigram_entropy(bytes(range(256))) == pytest.approx(math.log(256))
    assert unigram_entropy(b"aab") == pytest.approx(math.log(3) - 2 / 3 * math.log(2))


@pytest.mark.parametrize("size", [0, 1, 5, 100, 5000])
def test_slices_are_adjacent_and_bounded(size: int) -> None:
    text = load_text()[:size]
    bounds = slice_bounds(text, 4, 300)
    assert bounds[0][0] == 0 and all(a[1] == b[0] for a, b in zip(bounds, bounds[1:], strict=False))
    assert all(0 <= end - first <= 300 for first, end in bounds)
    if size <= 1200:
        assert bounds[-1][1] == size


def test_the_model_does_not_see_the_future() -> None:
    torch.manual_seed(0)
    model = ByteLanguageModel(32, Still, 2, moe_dtype=torch.float32)
    bytes_BS = torch.randint(0, 256, (2, 40))
    before = model(bytes_BS)
    changed = bytes_BS.clone()
    changed[:, 25] = (changed[:, 25] + 1) % 256
    after = model(changed)
    assert torch.equal(before[:, :25], after[:, :25])
    assert not torch.equal(before[:, 25], after[:, 25])


def test_master_weights_keep_updates_that_bf16_loses() -> None:
    parameter = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    plain = nn.Parameter(torch.ones(8))
    optimizer, reference = MasterAdamW([parameter], 1e-4), torch.optim.AdamW([plain], lr=1e-4, weight_decay=0.0)
    for _ in range(100):
        parameter.grad, plain.grad = torch.ones(8, dtype=torch.bfloat16), torch.ones(8)
        optimizer.step()
        reference.step()
    # one step of 1e-4 is below half a BF16 step at 1, a hundred of them are not
    assert torch.equal(parameter, plain.to(torch.bfloat16)) and parameter[0].item() < 0.995


@pytest.mark.slow
def test_gradients_are_those_of_one_process(tmp_path: Path) -> None:
    """One rank, an expert-parallel group of two, and two replicas give the same gradients of the mean loss."""
    script = tmp_path / "gradients.py"
    script.write_text(GRADIENTS)
    overrides = [*SMALL, "quantization.weights=none", "model.dtype=float32"]
    results: dict[str, dict[str, torch.Tensor]] = {}
    for name, ranks, group in (("one", 1, 1), ("expert", 2, 2), ("data", 2, 1)):
        sizes = [f"launch.nproc={ranks}", f"parallel.expert_parallel_size={group}"]
        done = megamoe("launch", QUICKSTART, *overrides, *sizes, "--", str(script), str(tmp_path / name))
        assert done.returncode == 0, done.stderr
        for rank in range(ranks):
            results[f"{name}.{rank}"] = torch.load(tmp_path / f"{name}.{rank}")
    expected = results.pop("one.0")
    assert any(".experts." in name for name in expected) and any(".router." in name for name in expected)
    for place, gradients in results.items():
        assert gradients.keys() == expected.keys()
        for name, gradient in gradients.items():
            error = float((gradient - expected[name]).norm() / (expected[name].norm() + 1e-12))
            assert error < 1e-5, f"{place} {name}: {error:.1e}"


@pytest.mark.slow
def test_train_learns_more_than_byte_frequencies(tmp_path: Path) -> None:
    plot = tmp_path / "load.png"
    arguments = ["launch.job=train", "launch.steps=60", "launch.batch_tokens=128", "launch.layers=1"]
    done = megamoe("launch", QUICKSTART, *SMALL, *arguments, "--plot", str(plot), timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    for words in ("first loss", "last loss", "unigram entropy", f"{unigram_entropy(load_text()):.4f}"):
        assert words in done.stdout
    assert plot.exists()


@pytest.mark.slow
def test_train_that_did_not_learn_fails() -> None:
    done = megamoe("launch", QUICKSTART, *SMALL, "launch.job=train", "launch.steps=2")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "train: FAILED" in done.stdout and "Traceback" not in done.stderr


def test_a_text_too_short_to_train_on_is_one_sentence(tmp_path: Path) -> None:
    text = tmp_path / "short.txt"
    text.write_bytes(b"too short")
    done = megamoe("launch", QUICKSTART, *SMALL, "launch.job=train", "launch.nproc=1",
                   "parallel.expert_parallel_size=1", "--text", str(text))  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and "9" in done.stderr and "Traceback" not in done.stderr
