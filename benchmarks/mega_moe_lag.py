"""How far L2 stays behind L1: times of the mega-kernel with other lags than its own, on several ranks.

    torchrun --nproc-per-node 2 benchmarks/mega_moe_lag.py [--only flash] [--tokens 2048,8192] [--lags 1,2,own,8,all]

L2 scatters rows over NVLink while the pulls of later rows still come in. A larger lag keeps L2 away from them and
needs a larger second ring; `all` holds L2 back until all of L1 is done, `own` is what the kernel takes. The lag decides
speed alone: every output is compared bit by bit with the one of the own lag, which the oracle has seen. Calls of the
instance that runs so many tokens, prefill or expanded, back to back and chilled (`rank_timing.py`).
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass, fields

import rank_timing
import result_file
import torch
import torch.distributed as dist
from mega_moe import MODELS, TOKENS, Layer, add_options, check, start_several_ranks

from megamoe.config import MoESpec
from megamoe.kernels.cpu_engine import load as load_host
from megamoe.kernels.mega_moe import INSTANCES, MegaMoeInstance, layer_shape, select_instance

LAG, RING2 = 8, 10  # of the TileShape (layout/workspace.h)
MOST_UNITS = 96  # that a larger second ring has room for
VARIED = ("prefill", "expanded")  # whose lag is worth a look: with fewer rows L2 has little to hide behind


@dataclass(frozen=True)
class Lagged(MegaMoeInstance):
    """An instance with another lag.

    Attributes:
        lag: units that L2 stays behind L1.
    """

    lag: int = 0

    def tile(self, spec: MoESpec, rows_hint: int, num_tokens: int) -> tuple[int, ...]:
        """Return the TileShape, with a second ring that is larger or smaller by as much as the lag."""
        numbers = list(super().tile(spec, rows_hint, num_tokens))
        numbers[RING2] += self.lag - numbers[LAG]
        numbers[LAG] = self.lag
        return tuple(numbers)


def with_lag(own: MegaMoeInstance, lag: int) -> Lagged:
    """Return an instance with this lag."""
    return Lagged(**{field.name: getattr(own, field.name) for field in fields(own)}, lag=lag)


def varied(spec: MoESpec, num_tokens: int, world_size: int) -> MegaMoeInstance:
    """Return the instance that runs so many tokens a rank.

    Raises:
        ValueError: one whose lag does not vary here.
    """
    own = select_instance(spec, num_tokens, world_size)
    if own.name not in VARIED:
        raise ValueError(
            f"--tokens: {num_tokens} tokens a rank are run by the instance {own.name}, and it is the lag of "
            f"{' and '.join(VARIED)} that varies; ask for more tokens"
        )
    return own


def lags_of(text: str) -> list[str]:
    """Return the lags of an option.

    Raises:
        ArgumentTypeError: neither a whole number from 1 on, nor `own`, nor `all`.
    """
    words = text.split(",")
    for word in words:
        if word not in ("own", "all") and not (word.isdigit() and int(word) > 0):
            raise argparse.ArgumentTypeError(f"must be whole numbers from 1 on, own or all, with commas, got {word!r}")
    return words


def units_of(counts: list[list[int]], tile: tuple[int, ...]) -> int:
    """Return the most units that any rank has: the lag that holds all of L2 back.

    Args:
        counts: `[source rank][expert]` choices.
        tile: TileShape.
    """
    local = len(counts[0]) // len(counts)
    rows = [sum(column) for column in zip(*counts, strict=True)]
    units = [math.ceil(math.ceil(count / tile[0]) / tile[1]) for count in rows]
    return max(sum(units[i : i + local]) for i in range(0, len(units), local))


def measure(layer: Layer, num_tokens: int, lags: list[str], nccl: dist.ProcessGroup) -> list[dict[str, object]]:
    """Measure one case by every lag; return its rows."""
    spec, tokens = layer.spec, layer.tokens(num_tokens)
    instance = varied(spec, num_tokens, layer.world_size)
    hint = num_tokens * layer.world_size * spec.top_k // spec.num_experts
    own = instance.tile(spec, hint, num_tokens)
    expected = torch.full_like(tokens[0], float("nan"))
    layer.workspace.launch(layer.plan, *tokens, expected, instance=instance)
    layer.finish()
    compared = check(spec, layer.weights, tokens, expected)
    units = units_of(layer.counts(tokens[1]), own)
    chosen = {word: own[LAG] if word == "own" else units if word == "all" else min(units, int(word)) for word in lags}
    rows: list[dict[str, object]] = []
    done: set[int] = set()
    for word, lag in chosen.items():
        if lag in done:
            continue
        done.add(lag)
        tile = with_lag(instance, lag).tile(spec, hint, num_tokens)
        needed = load_host().layout_from_numbers(layer.workspace.limits, layer_shape(spec), tile)["bytes"]
        if needed > layer.memory_bytes:
            raise SystemExit(
                f"--lags: a lag of {lag} units needs {needed} bytes of workspace, there are {layer.memory_bytes}"
            )
        y = torch.full_like(expected, float("nan"))
        call = _call(layer, tokens, y, instance if word == "own" else with_lag(instance, lag))
        times = {
            "back to back": rank_timing.back_to_back(call, layer.collectives),
            "chilled": rank_timing.chilled(call, layer.collectives, nccl),
        }
        layer.finish()
        wrong = "" if compared.ok else compared.text
        if not torch.equal(y.view(torch.int16), expected.view(torch.int16)):
            wrong = wrong or "differs from the output of the own lag"
        case = f"{layer.case(num_tokens)} lag={lag}"
        for rank, report in enumerate(layer.collectives.gather_objects(wrong, phase="verdict")):
            if report:
                raise SystemExit(f"{case}: rank {rank}: {report}")
        common = {
            "case": case,
            "instance": instance.name,
            "own_lag": own[LAG],
            "units": units,
            "error": (2 * compared.diff) ** 0.5,
        }
        rows += [{**common, "method": method, "us": us} for method, us in times.items()]
        if layer.rank == 0:
            said = ", ".join(f"{method} {us:.1f} us" for method, us in times.items())
            print(f"{case} ({word} of {units} units, own {own[LAG]}): {said}", flush=True)
    return rows


def _call(
    layer: Layer, tokens: tuple[torch.Tensor, ...], y: torch.Tensor, instance: MegaMoeInstance
) -> Callable[[], None]:
    x, ids, weights = tokens

    def call() -> None:
        layer.workspace.launch(layer.plan, x, ids, weights, y, instance=instance)

    return call


def main() -> None:
    """Measure what is asked for, and write the results where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, "flash", (2048, 8192))
    parser.add_argument("--lags", type=lags_of, default="1,2,own,8,all", help="units, `own` or `all`, with commas")
    options = parser.parse_args()
    collectives, nccl = start_several_ranks(parser)
    rows: list[dict[str, object]] = []
    for model in options.only:
        columns = -(-MODELS[model][1] // 128) * 128
        unit_rows = max(INSTANCES[name].unit_blocks * INSTANCES[name].block_rows for name in VARIED)
        # h, its scales, and what is known of a row
        spare = MOST_UNITS * unit_rows * (columns + columns // 32 + 64)
        layer = Layer(model, collectives, options.comm, max(TOKENS), spare)
        for num_tokens in options.tokens:
            try:
                varied(layer.spec, num_tokens, layer.world_size)
            except ValueError as error:
                parser.error(str(error))
            rows += measure(layer, num_tokens, options.lags, nccl)
        layer.workspace.close()
        torch.cuda.empty_cache()
        if options.out and collectives.rank == 0:
            result_file.write(options.out, rows)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
