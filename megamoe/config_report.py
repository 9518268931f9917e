"""What `megamoe config` prints: the resolved values, bytes per rank and the valid expert-parallel sizes.

Everything is arithmetic on the configuration: nothing is allocated, and torch is not imported.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from megamoe.attention_sizes import attention_sizes
from megamoe.config import MoEConfig, local_expert_range, valid_expert_parallel_sizes
from megamoe.errors import ConfigError

__all__ = ["Sizes", "resolved_report", "run_config_command", "sizes"]

MIB = 1 << 20
_DTYPE_BYTES = {"bfloat16": 2, "float32": 4}
_FP32_BYTES = 4
_INT64_BYTES = 8
_INDENT = "  "


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Bytes of one MoE layer on one rank; what each number counts is said in `resolved_report`.

    Args:
        local_experts: routed experts of a rank.
        expert_parameters: numbers in the local experts' weights and biases.
        expert_bytes: these in the model's dtype.
        packed_bytes: these in the weight format, scales included.
        replicated_parameters: numbers that every rank holds: router and shared experts.
        replicated_bytes: these as stored: the router in FP32, shared experts in the model's dtype; and the INT64 table
            of `router.select: hash`.
        input_bytes: tokens, scales, ids and routing weights of one full call.
        slot_bytes: results of all (token, k) pairs of one full call, before they are summed.
        balanced_rows: rows that a rank receives when every rank sends a full call and routing is balanced.
        worst_rows: the same when every token of every rank chooses as many experts of this rank as it can.
        row_bytes: one received row before the first linear, and after the activation.
    """

    local_experts: int
    expert_parameters: int
    expert_bytes: int
    packed_bytes: int
    replicated_parameters: int
    replicated_bytes: int
    input_bytes: int
    slot_bytes: int
    balanced_rows: int
    worst_rows: int
    row_bytes: int


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _packed_bytes_per_expert(config: MoEConfig) -> int:
    """Return the bytes of one expert's two weights in the weight format, scales included, biases not."""
    spec = config.spec
    hidden, intermediate, elements = spec.hidden, spec.intermediate, 3 * spec.hidden * spec.intermediate
    if spec.weight_format == "none":
        return elements * _DTYPE_BYTES[config.model.dtype]
    if spec.weight_format == "mxfp4":  # 4 bits, and 8 bits of scale per 32 elements
        return elements // 2 + elements // 32
    # fp8_block: 1 byte, and an FP32 scale per 128 x 128 block of gate, up and down, of which the last may be short
    return elements + _FP32_BYTES * 3 * _ceil_div(hidden, 128) * _ceil_div(intermediate, 128)


def _row_bytes(elements: int, config: MoEConfig, scale_per: int | None) -> int:
    """Return the bytes of one activation row: E4M3 with FP32 scales, or the model's dtype."""
    if config.spec.act_scale == "none":
        return elements * _DTYPE_BYTES[config.model.dtype]
    return elements + _FP32_BYTES * (1 if scale_per is None else _ceil_div(elements, scale_per))


def sizes(config: MoEConfig) -> Sizes:
    """Return the sizes of one MoE layer on one rank, computed without allocating anything."""
    spec, model, parallel = config.spec, config.model, config.parallel
    hidden, intermediate, top_k = spec.hidden, spec.intermediate, spec.top_k
    dtype_bytes = _DTYPE_BYTES[model.dtype]
    first, last = local_expert_range(spec.num_experts, 0, parallel.expert_parallel_size)
    local = last - first

    bias = 2 * intermediate + hidden if spec.expert_bias else 0
    expert_parameters = local * (3 * hidden * intermediate + bias)
    router = spec.num_experts * (hidden + int(config.router.logit_bias) + int(config.router.bias))
    shared = 3 * hidden * model.shared_width + (hidden if model.shared_gate else 0)
    table = (model.vocab_size or 0) * top_k if config.router.select == "hash" else 0

    tokens = parallel.max_tokens_per_rank
    x_row = _row_bytes(hidden, config, 128 if spec.act_scale == "block128" else None)
    h_row = _row_bytes(intermediate, config, 128)
    # BF16, except that FP32 weights which are not quantised keep FP32 slots
    slot_element = dtype_bytes if spec.weight_format == "none" else 2
    return Sizes(
        local_experts=local,
        expert_parameters=expert_parameters,
        expert_bytes=expert_parameters * dtype_bytes,
        packed_bytes=local * (_packed_bytes_per_expert(config) + bias * dtype_bytes),
        replicated_parameters=router + shared,
        replicated_bytes=router * _FP32_BYTES + shared * dtype_bytes + table * _INT64_BYTES,
        input_bytes=tokens * (x_row + top_k * (4 + _FP32_BYTES)),
        slot_bytes=tokens * top_k * hidden * slot_element,
        balanced_rows=tokens * top_k,
        worst_rows=tokens * parallel.expert_parallel_size * min(top_k, local),
        row_bytes=x_row + h_row,
    )


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / MIB:,.1f} MiB"


def _value(value: Any) -> str:
    if value is None:
        return "-"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _resolved(config: MoEConfig) -> dict[tuple[str, str], tuple[Any, str]]:
    """Return (value in force, where it comes from) for each key that the configuration leaves open."""
    spec, model, launch = config.spec, config.model, config.launch
    resolved: dict[tuple[str, str], tuple[Any, str]] = {}
    if config.notes:
        resolved["quantization", "weights"] = (spec.weight_format, f"auto, for launch.job={launch.job}")
    if config.quantization.act_scale != spec.act_scale:
        asked = config.quantization.act_scale
        resolved["quantization", "act_scale"] = (spec.act_scale, f"{asked}, with weights {spec.weight_format}")
    if model.swiglu_alpha != spec.swiglu_alpha:
        resolved["model", "swiglu_alpha"] = (spec.swiglu_alpha, "default of swiglu_oai")
    if model.shared_experts and model.shared_intermediate is None:
        resolved["model", "shared_intermediate"] = (model.shared_width, "intermediate * shared_experts")
    if launch.nproc is None:
        resolved["launch", "nproc"] = (config.nproc, "expert_parallel_size / nnodes")
    return resolved


def _table(rows: Sequence[tuple[str, str, str]]) -> list[str]:
    """Return rows of (name, value, remark) as lines, in aligned columns."""
    name_width, value_width = (max(len(row[column]) for row in rows) for column in (0, 1))
    return [f"{_INDENT}{name:<{name_width}}  {value:<{value_width}}  {rest}".rstrip() for name, value, rest in rows]


def _attention_lines(config: MoEConfig) -> list[str]:
    """Return what one attention layer holds, and its cache of a token; nothing without attention."""
    if config.attention is None or config.indexer is None:
        return []
    dtype, element = config.model.dtype, _DTYPE_BYTES[config.model.dtype]
    found = attention_sizes(config.attention, config.indexer, config.model.hidden, element)
    kept = (
        "an entry and an index key per 4 tokens" if config.attention.kind == "compressed" else "a row and an index key"
    )
    rows = [
        ("attention", _mib(found.parameters * element), f"{found.parameters:,} parameters in {dtype}"),
        ("indexer", _mib(found.indexer_parameters * element), f"{found.indexer_parameters:,} parameters in {dtype}"),
        ("cache of a token", f"{found.token_bytes:,} bytes", kept),
    ]
    return ["", "one attention layer, the same on every rank", *_table(rows)]


def resolved_report(config: MoEConfig) -> str:
    """Return the text of `megamoe config`: every resolved value, sizes per rank and valid expert-parallel sizes."""
    spec, parallel = config.spec, config.parallel
    lines = [f"configuration: {config.source}", ""]
    resolved = _resolved(config)
    for section, content in config.to_dict().items():
        if content is None:
            lines += [f"{section}: none", ""]
            continue
        lines.append(section)
        entries = [(key, *resolved.get((section, key), (value, ""))) for key, value in content.items()]
        lines += [*_table([(key, _value(value), origin) for key, value, origin in entries]), ""]

    layer, ranks, tokens = sizes(config), parallel.expert_parallel_size, parallel.max_tokens_per_rank
    valid = ", ".join(map(str, valid_expert_parallel_sizes(spec.num_experts)))
    lines += [f"valid parallel.expert_parallel_size up to 64, for {spec.num_experts} experts: {valid}", ""]

    held = f"{layer.local_experts} of {spec.num_experts} experts"
    lines.append(f"parameters of one MoE layer on one of {ranks} ranks ({held})")
    dtype, expert_count = config.model.dtype, f"{layer.expert_parameters:,} parameters"
    rows = [("routed experts", _mib(layer.expert_bytes), f"{expert_count} in {dtype}")]
    if spec.weight_format != "none":
        rows.append(("packed", _mib(layer.packed_bytes), f"the same in {spec.weight_format}, scales included"))
    what = "router (FP32) and shared experts" if config.model.shared_experts else "router (FP32)"
    table = ", and the table of token ids (INT64)" if config.router.select == "hash" else ""
    replicated = f"{layer.replicated_parameters:,} parameters of {what}{table}, the same on every rank"
    rows += [("replicated", _mib(layer.replicated_bytes), replicated)]
    lines += [*_table(rows), ""]

    x_type = dtype if spec.act_scale == "none" else f"e4m3, one scale per {spec.act_scale}"
    lines.append(f"buffers of one call on one rank with parallel.max_tokens_per_rank={tokens} (estimate)")
    lines += _table(
        [
            ("inputs", _mib(layer.input_bytes), f"{tokens:,} tokens ({x_type}), ids and routing weights"),
            ("combine slots", _mib(layer.slot_bytes), f"{layer.balanced_rows:,} result rows of {spec.hidden}"),
            (
                "received rows, balanced",
                _mib(layer.balanced_rows * layer.row_bytes),
                f"{layer.balanced_rows:,} rows before and after the first linear, every rank sending a full call",
            ),
            (
                "received rows, worst case",
                _mib(layer.worst_rows * layer.row_bytes),
                f"{layer.worst_rows:,} rows: all tokens of all ranks choose this rank",
            ),
        ]
    )
    lines += [
        f"{_INDENT}Not counted: counters, lists, padding, communication buffers of a backend, gradients and optimizer "
        "state.",
        f"{_INDENT}A backend with rings holds a part of the received rows at a time; reference holds all, in its own "
        "dtypes.",
    ]
    lines += _attention_lines(config)
    return "\n".join([*lines, *(["", *config.notes] if config.notes else [])])


def run_config_command(path: str | Path, overrides: Sequence[str] = (), out: TextIO | None = None) -> int:
    """Print the report of a configuration.

    Args:
        path: YAML file or preset.
        overrides: `section.key=value` assignments.
        out: where the report goes; None = standard output. An error goes to standard error.

    Returns:
        0, or 2 after one sentence on standard error.
    """
    try:
        report = resolved_report(MoEConfig.from_yaml(path, overrides))
    except ConfigError as error:
        print(f"megamoe config: {error}", file=sys.stderr)
        return 2
    print(report, file=out or sys.stdout)
    return 0
