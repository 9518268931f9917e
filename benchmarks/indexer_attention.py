"""IndexerAttention on one GPU: prefill and decoding, held against the CPU, with memory and time by part.

    python benchmarks/indexer_attention.py [--out FILE] [--preset NAME] [--tokens T] [--batch B --length L]

The layer has the preset's sizes and random weights, BF16, and an FP8 indexer. The reference is the same module on the
CPU: the cache of a sample of tokens is copied there, page by page, and the token is decoded once more. Compared are
the row that the token adds to the cache, the keys that it keeps, and its output for the keys that the GPU kept. Time is
that of device events: `chilled` as gpu_timing has it for the whole call; parts are medians of 5 calls back to back,
each part with events around it.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import result_file
import torch
from gpu_timing import timed, wait
from torch import Tensor

import megamoe.layers.compressed_attention as compressed_module
import megamoe.layers.indexer_attention as indexer_module
from megamoe.config import MoEConfig
from megamoe.kernels.index_rows import write_rows
from megamoe.layers.attention import make_attention
from megamoe.layers.compressed_attention import CompressedAttention
from megamoe.layers.indexer_attention import IndexerAttention
from megamoe.layers.paged_cache import PagedCache
from megamoe.testing.numeric import row_diff

# BF16 on both sides, in other orders of summation: the bound of launch/attention_check.py
ROW_BOUND = 1e-3
# Of the kept keys, those that both sides keep: a query or key that rounds to another E4M3 neighbour moves a score by up
# to 1 / 16 of one of its terms, which changes the order of scores that are as close as that.
SHARED_BOUND = 0.985
SAMPLE = 6
MIB = 1 << 20


def layer_of(preset: str) -> IndexerAttention | CompressedAttention:
    """Build the preset's attention on the GPU, with an FP8 indexer."""
    config = MoEConfig.from_yaml(preset, ["indexer.quantization=fp8", "indexer.max_logits_mib=256"])
    torch.manual_seed(0)
    return make_attention(config, device="cuda").eval()


def hidden_states(batch: int, length: int, hidden: int, seed: int) -> Tensor:
    """Draw BF16 rows with a root mean square of 1, each a blend of its neighbours so that keys differ in worth."""
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(batch, length, hidden, device="cuda", generator=generator)
    x += 0.5 * x.roll(1, 1)
    return torch.nn.functional.rms_norm(x, (hidden,)).bfloat16()


# ---- the CPU's answer ------------------------------------------------------------------------------------------------


def copy_pages(source: PagedCache, sequence: int, target: PagedCache, length: int) -> None:
    """Bring the first rows of a sequence to sequence 0 of an empty cache, whole pages at a time."""
    target.extend([length, *[0] * (target.sequences - 1)])
    pages = -(-length // target.page_size)
    for name, pool in target.pools.items():
        here, there = target.block_table[0, :pages].long(), source.block_table[sequence, :pages].long()
        pool[here] = source.pools[name][there].cpu()


def compare_mla(
    layer: IndexerAttention, cache: PagedCache, samples: list[tuple[int, int, Tensor, Tensor, Tensor]]
) -> dict[str, float]:
    """Decode sampled tokens on the CPU: (sequence, earlier tokens, x, output, kept keys) as the GPU had them."""
    twin = copy.deepcopy(layer).cpu()
    worst, shared, rows = 0.0, 1.0, 0.0
    for sequence, length, x, out, kept in samples:
        x, out, kept = x.cpu().view(1, 1, -1), out.cpu().view(1, 1, -1), kept.cpu().view(1, 1, -1)
        small = twin.make_cache(1)
        copy_pages(cache, sequence, small, length)
        _, own = twin(x, cache=small, return_indices=True)
        slot = cache.slots(*(torch.tensor([place], device=cache.device) for place in (sequence, length)))
        mine = small.slots(torch.tensor([0]), torch.tensor([length]))
        rows = max(rows, float(row_diff(cache.rows("rows")[slot].cpu(), small.rows("rows")[mine]).max()))
        chosen = {i for i in kept.flatten().tolist() if i >= 0}
        both = chosen & {i for i in own.flatten().tolist() if i >= 0}
        assert len(chosen) == min(length + 1, kept.shape[-1]), "as many keys as there are, each once"
        shared = min(shared, len(both) / len(chosen))
        small.truncate(0, length)
        expected = twin(x, cache=small, topk_indices=kept)
        worst = max(worst, float(row_diff(out, expected).max()))
    return {"row_error": worst, "cache_row_error": rows, "shared_keys": shared}


def judge(name: str, found: dict[str, float]) -> dict[str, float]:
    """Print a comparison and end the process when it is out of bounds."""
    print(f"{name}: " + ", ".join(f"{key} {value:.4g}" for key, value in found.items()))
    if not (found["row_error"] <= ROW_BOUND and found["cache_row_error"] <= ROW_BOUND):
        raise SystemExit(f"{name}: FAILED: a row is off by more than {ROW_BOUND}")
    if not found["shared_keys"] >= SHARED_BOUND:
        raise SystemExit(f"{name}: FAILED: fewer than {SHARED_BOUND:.1%} of the kept keys are the CPU's")
    return found


# ---- time and memory -------------------------------------------------------------------------------------------------


@contextmanager
def events_around(targets: dict[str, tuple[Any, str]]) -> Iterator[dict[str, list[tuple[Any, Any]]]]:
    """Put device events around functions for as long as the context lasts: name -> (object, attribute)."""
    found: dict[str, list[tuple[Any, Any]]] = defaultdict(list)
    kept = {name: getattr(owner, attribute) for name, (owner, attribute) in targets.items()}

    def around(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            result = function(*args, **kwargs)
            last.record()
            found[name].append((first, last))
            return result

        return call

    for name, (owner, attribute) in targets.items():
        setattr(owner, attribute, around(name, kept[name]))
    try:
        yield found
    finally:
        for name, (owner, attribute) in targets.items():
            if isinstance(owner, torch.nn.Module):
                delattr(owner, attribute)
            else:
                setattr(owner, attribute, kept[name])


def time_parts(layer: Any, call: Callable[[], object]) -> dict[str, float]:
    """Return milliseconds by part; parts that hold others are whole."""
    module = compressed_module if isinstance(layer, CompressedAttention) else indexer_module
    scorer = layer.indexer
    targets = {
        "choice": (layer, "_choose"),
        "choice: queries": (scorer, "queries"),
        "choice: scores and top-k": (scorer, "select"),
        "choice: scores and top-k, paged": (scorer, "select_paged"),
        "attention": (layer, "_attend"),
        "attention: gather and softmax": (module, "sparse_attention"),
    }
    runs = []
    for _ in range(5):
        with events_around(targets) as found:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            wait(20.0)
        run = {name: sum(first.elapsed_time(last) for first, last in pairs) for name, pairs in found.items()}
        runs.append({"all": begin.elapsed_time(end), **run})
    return {name: median(run[name] for run in runs) for name in runs[0]}


def peak_of(call: Callable[[], object]) -> int:
    """Return the bytes that a call holds at most, beyond what was held before it."""
    wait(20.0)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    wait(20.0)
    return torch.cuda.max_memory_allocated() - before


def report(name: str, chilled_us: float, parts: dict[str, float], peak: int, bound: int) -> dict[str, Any]:
    """Print times and memory; end the process when the memory is out of bounds."""
    print(f"{name}: chilled {chilled_us / 1e3:.3f} ms, peak {peak / MIB:.0f} MiB (bound {bound / MIB:.0f} MiB)")
    for part, milliseconds in parts.items():
        print(f"    {part:<34} {milliseconds:9.3f} ms")
    if peak > bound:
        raise SystemExit(f"{name}: FAILED: holds {peak / MIB:.0f} MiB, more than {bound / MIB:.0f} MiB")
    return {"chilled_ms": chilled_us / 1e3, "parts_ms": parts, "peak_mib": peak / MIB, "bound_mib": bound / MIB}


# ---- the two cases ---------------------------------------------------------------------------------------------------


@torch.no_grad()
def prefill(layer: IndexerAttention, tokens: int) -> dict[str, Any]:
    """One sequence: correctness on a sample, then memory at 4 times the tokens, then time."""
    x = hidden_states(1, tokens, layer.hidden, 1)
    cache = layer.make_cache(1, pages=-(-tokens // 64))
    out, kept = layer(x, cache=cache, return_indices=True)
    places = torch.linspace(3, tokens - 1, SAMPLE).int().tolist()
    samples = [(0, s, x[0, s], out[0, s], kept[0, s]) for s in places]
    found = judge(f"prefill {tokens}", compare_mla(layer, cache, samples))
    del cache, out, kept
    # index lists and rows grow with the tokens; FP32 scores of all for all would be 4 bytes x tokens^2
    long = hidden_states(1, 4 * tokens, layer.hidden, 2)
    linear = 4 * tokens * (2 * 4 * layer.config[1].top_k + 4 * layer.hidden)
    bound = linear + (1200 << 20)
    assert bound < 4 * (4 * tokens) ** 2, "a bound that such scores would break"
    peak = peak_of(lambda: layer(long))
    chilled, parts = timed(lambda: layer(x))[0], time_parts(layer, lambda: layer(x))
    measured = report(f"prefill {tokens}, memory of {4 * tokens}", chilled, parts, peak, bound)
    return {"case": f"attention=prefill T={tokens}", "method": "chilled", **found, **measured}


@torch.no_grad()
def decode(layer: IndexerAttention, batch: int, length: int) -> dict[str, Any]:
    """One token for each of a batch of sequences, whose earlier tokens are drawn, not computed."""
    options = layer.config[1]
    pages = batch * (-(-(length + 1) // 64))
    cache = layer.make_cache(batch, pages=pages)
    cache.extend([length] * batch)
    generator = torch.Generator("cuda").manual_seed(3)
    for b in range(batch):
        slots = cache.slots(torch.full((length,), b, device="cuda"), torch.arange(length, device="cuda"))
        rows = torch.randn(length, layer.row_width, device="cuda", generator=generator).bfloat16()
        cache.write("rows", slots, rows)
        keys = torch.randn(length, options.head_dim, device="cuda", generator=generator).bfloat16()
        write_rows(cache.pools["keys"], slots, keys, options.quantization, hadamard=options.hadamard)
    x = hidden_states(batch, 1, layer.hidden, 4)
    out, kept = layer(x, cache=cache, return_indices=True)
    samples = [(b, length, x[b, 0], out[b, 0], kept[b, 0]) for b in torch.linspace(0, batch - 1, 3).int().tolist()]
    found = judge(f"decode {batch} x {length}", compare_mla(layer, cache, samples))

    def step() -> None:
        for b in range(batch):  # host work; pages stay, and so do addresses
            cache.host_lengths[b] = length
        cache.lengths.fill_(length)
        layer(x, cache=cache)

    peak = peak_of(step)
    started = time.perf_counter()
    step()
    host = time.perf_counter() - started
    wait(20.0)
    # scores, index lists, queries and the gathered rows
    bound = 4 * batch * length + (700 << 20)
    result = report(f"decode {batch} x {length}", timed(step)[0], time_parts(layer, step), peak, bound)
    print(f"    host {1e3 * host:.2f} ms a step")
    return {
        "case": f"attention=decode B={batch} L={length}",
        "method": "chilled",
        **found,
        **result,
        "host_ms": 1e3 * host,
    }


def main() -> None:
    """Run both cases and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--preset", default="deepseek_v32")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--length", type=int, default=32768)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a Hopper GPU, torch finds no CUDA device")
    layer = layer_of(options.preset)
    assert isinstance(layer, IndexerAttention), "a preset whose attention keeps a latent"
    print(f"{options.preset}: {layer}")
    rows = [prefill(layer, options.tokens), decode(layer, options.batch, options.length)]
    if options.out is not None:
        result_file.write(options.out, rows, preset=options.preset)


if __name__ == "__main__":
    main()
