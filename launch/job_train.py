"""Job `train`: a small byte-level MoE language model on a text, data parallel around expert-parallel MoE layers."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable

import torch
import torch.distributed as dist
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn
from torch.nn import functional as F

from megamoe.config import MoEConfig
from megamoe.errors import ConfigError
from megamoe.launch.language_model import ByteLanguageModel
from megamoe.launch.plot import save_expert_load
from megamoe.launch.report import console, print_load, summary_table
from megamoe.launch.runtime import Runtime
from megamoe.launch.text import unigram_entropy
from megamoe.layers.attention import make_attention
from megamoe.layers.experts import is_expert_parallel
from megamoe.layers.indexer_attention import IndexerAttention
from megamoe.layers.moe import MoELayer, sync_replicated_grads

__all__ = ["MasterAdamW", "build_model", "run_train", "share_of_loss", "sum_gradients"]

_SEQUENCE = 64  # bytes of one training sequence, where the batch and the text allow
_AVERAGED_STEPS = 20  # the final loss is the mean over the last ones
_LINE_EVERY = 25  # steps between lines where there is no terminal for a progress bar


class MasterAdamW:
    """AdamW on FP32 copies of the parameters, so that BF16 parameters do not lose small updates.

    Args:
        parameters: what is trained, FP32 or BF16.
        learning_rate: of AdamW.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], learning_rate: float) -> None:
        self.parameters = list(parameters)
        self.masters = [p if p.dtype == torch.float32 else p.detach().float().clone() for p in self.parameters]
        self.optimizer = torch.optim.AdamW(self.masters, lr=learning_rate, weight_decay=0.0, fused=True)

    @torch.no_grad()
    def step(self) -> None:
        """Apply the gradients of the parameters and clear them."""
        pairs = list(zip(self.parameters, self.masters, strict=True))
        for parameter, master in pairs:
            if master is not parameter:
                master.grad = None if parameter.grad is None else parameter.grad.float()
        self.optimizer.step()
        for parameter, master in pairs:
            if master is not parameter:
                parameter.copy_(master)
            parameter.grad = None


def sum_gradients(model: nn.Module, runtime: Runtime, timeout_s: float) -> None:
    """Turn the gradients of the ranks' shares of a loss into those of the whole loss. Collective.

    Replicated parameters saw this rank's tokens only, so their gradients are summed over all ranks. An expert's
    gradient already holds the tokens of every rank of its group, because the backward of the dispatch brought them
    here: it is summed over the other copies of that expert alone.
    """
    sync_replicated_grads(model, dist.group.WORLD, timeout_s=timeout_s)
    if runtime.num_groups == 1:
        return
    experts = [p for p in model.parameters() if is_expert_parallel(p)]
    flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).float().flatten() for p in experts])
    dist.all_reduce(flat, group=runtime.replicas)
    for parameter, part in zip(experts, flat.split([p.numel() for p in experts]), strict=True):
        parameter.grad = part.view_as(parameter).to(parameter.dtype)


def share_of_loss(model: ByteLanguageModel, inputs: Tensor, targets: Tensor, tokens: int) -> Tensor:
    """Return this rank's share of the mean loss over `tokens` bytes of all ranks, in nats per byte.

    The sum over this rank's bytes is divided by the bytes of all ranks, so that the shares add up to the mean loss and
    summed gradients are those of the mean loss.
    """
    logits = model(inputs)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / tokens


def _batch(text: Tensor, sequences: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw sequences at random places; returns inputs and next bytes, both `[sequences, length]` int64."""
    starts = torch.randint(0, len(text) - length, (sequences, 1), generator=generator)
    windows = text[starts + torch.arange(length + 1)].long()
    return windows[:, :-1], windows[:, 1:]


def _for_training(config: MoEConfig, runtime: Runtime) -> MoEConfig:
    """Choose what training needs: a backend with a backward, and on a CPU parameters in FP32.

    A BF16 matrix product takes up to 80 times as long as an FP32 one on a CPU without BF16 instructions (measured on an
    AVX2 machine, 128 x 256 x 1024).
    """
    if config.kernel.backend == "auto":
        config = dataclasses.replace(config, kernel=dataclasses.replace(config.kernel, backend="reference"))
    if runtime.device.type == "cpu":
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, dtype="float32"))
    return config


def build_model(config: MoEConfig, runtime: Runtime) -> ByteLanguageModel:
    """Build the model with equal replicated parameters on all ranks and equal experts on all replicas."""
    torch.manual_seed(config.launch.seed)
    dtype = getattr(torch, config.model.dtype)
    return ByteLanguageModel(
        config.model.hidden,
        lambda: MoELayer(config, runtime.group, device=runtime.device),
        config.launch.layers,
        moe_dtype=dtype,
        make_mix=None if config.attention is None else lambda: make_attention(config, device=runtime.device),
    ).to(runtime.device)


def run_train(config: MoEConfig, runtime: Runtime, text: bytes, *, plot: str | None = None) -> bool:
    """Train, print the losses beside the text's entropy, and tell whether the model learnt more than byte frequencies.

    Args:
        config: the checked configuration, with weights that are not quantised.
        runtime: this rank's place.
        text: what to learn.
        plot: where rank 0 draws the experts' load.

    Returns:
        True when the mean loss of the last steps is below the unigram entropy of the text.
    """
    config = _for_training(config, runtime)
    length = min(_SEQUENCE, config.launch.batch_tokens)
    if len(text) < length + 2:
        raise ConfigError(f"--text: training takes sequences of {length} bytes, and the text has {len(text)}")
    sequences = config.launch.batch_tokens // length
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    model = build_model(config, runtime)
    optimizer = MasterAdamW(model.parameters(), config.launch.learning_rate)
    generator = torch.Generator().manual_seed(config.launch.seed * 100_003 + runtime.rank)
    tokens_per_step = sequences * length * runtime.world_size
    entropy = unigram_entropy(text)
    averaged = min(_AVERAGED_STEPS, config.launch.steps)

    losses: list[float] = []
    moes = [module for module in model.modules() if isinstance(module, MoELayer)]
    out = console()
    bar = Progress(
        TextColumn("train"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[loss]}"),
        TimeRemainingColumn(), console=out, disable=runtime.rank != 0 or not out.is_terminal,
    )  # fmt: skip
    started = time.perf_counter()
    with bar:
        task = bar.add_task("train", total=config.launch.steps, loss="")
        for step in range(config.launch.steps):
            if step == config.launch.steps - averaged:
                for moe in moes:
                    moe.router.reset_load()
            inputs, targets = (part.to(runtime.device) for part in _batch(data, sequences, length, generator))
            share = share_of_loss(model, inputs, targets, tokens_per_step)
            auxiliary = [moe.aux_loss for moe in moes if moe.aux_loss is not None]
            # nothing but the indexers' own parameters has a gradient of these
            indexers = [module for module in model.mixes if isinstance(module, IndexerAttention)]
            auxiliary += [module.indexer_loss for module in indexers if module.indexer_loss is not None]
            total = share + torch.stack(auxiliary).sum() / runtime.world_size if auxiliary else share
            total.backward()
            sum_gradients(model, runtime, config.parallel.timeout_s)
            optimizer.step()
            mean = share.detach().cpu()
            dist.all_reduce(mean)
            loss = float(mean)
            losses.append(loss)
            bar.update(task, advance=1, loss=f"loss {loss:.3f}")
            if runtime.rank == 0 and not out.is_terminal and step % _LINE_EVERY == 0:
                out.print(f"step {step:>5}  loss {loss:.4f}")
    elapsed = time.perf_counter() - started

    load = torch.stack([moe.router.load.cpu() for moe in moes]).sum(0)
    dist.all_reduce(load)
    last = sum(losses[-averaged:]) / averaged
    passed = last < entropy
    if runtime.rank == 0:
        _report(config, runtime, losses[0], last, averaged, entropy, elapsed, tokens_per_step, load.tolist())
        if plot is not None:
            title = f"expert load, last {averaged} training steps"
            save_expert_load(plot, load.tolist(), config.model.num_experts // runtime.group_size, title)
            out.print(f"plot written to {plot}")
        if not passed:
            out.print(f"train: FAILED: the loss {last:.4f} is not below the unigram entropy {entropy:.4f} of the text")
    return passed


def _report(
    config: MoEConfig,
    runtime: Runtime,
    first: float,
    last: float,
    averaged: int,
    entropy: float,
    elapsed: float,
    tokens_per_step: int,
    load: list[int],
) -> None:
    out = console()
    steps = config.launch.steps
    rows = [
        ("ranks", f"{runtime.world_size} on {runtime.device.type}, groups of {runtime.group_size}"),
        ("parameters", f"{config.model.dtype}, {config.launch.layers} layers of {config.model.num_experts} experts"),
        ("steps", f"{steps} of {tokens_per_step} bytes, {1e3 * elapsed / steps:.0f} ms each"),
        ("first loss", f"{first:.4f} nats/byte"),
        ("last loss", f"{last:.4f} nats/byte, mean of the last {averaged} steps"),
        ("unigram entropy", f"{entropy:.4f} nats/byte"),
    ]
    out.print(summary_table("train", ("", "value"), rows))
    out.print(f"expert load over the last {averaged} steps, all layers")
    print_load(out, load, config.model.num_experts // runtime.group_size)
