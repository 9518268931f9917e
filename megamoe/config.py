"""The configuration of a MoE layer and of the job around it: frozen dataclasses, read from strict YAML.

A wrong configuration is one sentence, before any process is started: the file, the key, the rule, the nearest valid
choice. This module imports neither torch nor anything that does.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from megamoe.config_schema import apply_overrides, check_sections, one_line, parse_yaml, preset_names, read_source
from megamoe.config_sections import (
    INDEXER_PAGES,
    OPTIONAL_SECTIONS,
    SECTIONS,
    AttentionConfig,
    IndexerConfig,
    KernelConfig,
    LaunchConfig,
    ModelConfig,
    MoESpec,
    ParallelConfig,
    QuantizationConfig,
    RouterConfig,
    check_op,
    local_expert_range,
    refuse_uneven_split,
    valid_expert_parallel_sizes,
)
from megamoe.errors import ConfigError

__all__ = [
    "AttentionConfig",
    "IndexerConfig",
    "KernelConfig",
    "LaunchConfig",
    "MoEConfig",
    "MoESpec",
    "ModelConfig",
    "ParallelConfig",
    "QuantizationConfig",
    "RouterConfig",
    "local_expert_range",
    "preset_names",
    "valid_expert_parallel_sizes",
]

# quantization.weights="auto": gradients need weights that are not quantised
_WEIGHTS_OF_JOB = {"train": "none", "infer": "mxfp4", "script": "mxfp4"}

# field of MoESpec -> key of the YAML, where it is not model.<field>
_YAML_KEY = {"weight_format": "quantization.weights", "act_scale": "quantization.act_scale"}


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """A whole configuration, checked and resolved.

    Args:
        model, router, quantization, parallel, kernel, indexer, attention, launch: the sections; `indexer` and
            `attention` may be None.
        source: where it came from, for messages.

    Attributes:
        notes: one sentence for each value that was chosen for the user.

    Raises:
        ConfigError: sections that do not fit together.
    """

    model: ModelConfig
    router: RouterConfig
    quantization: QuantizationConfig = QuantizationConfig()
    parallel: ParallelConfig = ParallelConfig()
    kernel: KernelConfig = KernelConfig()
    indexer: IndexerConfig | None = None
    attention: AttentionConfig | None = None
    launch: LaunchConfig = LaunchConfig()
    source: str = dataclasses.field(default="<python>", compare=False)
    notes: tuple[str, ...] = dataclasses.field(init=False, default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        self._resolve_weights()
        self._check_router()
        self._check_ranks()
        self._check_attention()
        _ = self.spec

    def _resolve_weights(self) -> None:
        job = self.launch.job
        if self.quantization.weights == "auto":
            weights = _WEIGHTS_OF_JOB[job]
            object.__setattr__(self, "quantization", dataclasses.replace(self.quantization, weights=weights))
            why = "gradients need weights that are not quantised" if job == "train" else "the format of the fast path"
            object.__setattr__(self, "notes", (f"quantization.weights: auto is {weights} for launch.job={job}: {why}",))
        elif job == "train" and self.quantization.weights != "none":
            raise ConfigError(
                f"launch.job=train needs quantization.weights=none, got {self.quantization.weights}, because quantised "
                f"weights have no gradient; set quantization.weights=none"
            )

    def _check_router(self) -> None:
        model, router = self.model, self.router
        if router.select == "hash" and model.vocab_size is None:
            raise ConfigError(
                "router.select=hash needs model.vocab_size, the number of token ids in the table; set it, "
                "or use router.select=topk"
            )
        if model.num_experts % router.groups:
            divisors = [n for n in range(1, model.num_experts + 1) if model.num_experts % n == 0]
            near = min(divisors, key=lambda n: abs(n - router.groups))
            raise ConfigError(
                f"router.groups={router.groups} does not divide model.num_experts={model.num_experts}; "
                f"the nearest valid value is {near}"
            )
        group_size = model.num_experts // router.groups
        if router.groups > 1 and router.group_reduce == "top2" and group_size < 2:
            raise ConfigError(
                f"router.group_reduce=top2 needs at least 2 experts in a group, and router.groups={router.groups} "
                f"leaves {group_size}; use router.group_reduce=max"
            )
        reachable = group_size * router.topk_groups
        if reachable < model.top_k <= model.num_experts:
            raise ConfigError(
                f"model.top_k={model.top_k} exceeds the {reachable} experts in router.topk_groups={router.topk_groups} "
                f"groups of {group_size}; use at least router.topk_groups={-(-model.top_k // group_size)}"
            )

    def _check_ranks(self) -> None:
        parallel, launch = self.parallel, self.launch
        refuse_uneven_split(
            self.model.num_experts,
            parallel.expert_parallel_size,
            "model.num_experts",
            "parallel.expert_parallel_size",
        )
        if launch.nproc is None:
            if parallel.expert_parallel_size % launch.nnodes:
                raise ConfigError(
                    f"launch.nnodes={launch.nnodes} does not divide "
                    f"parallel.expert_parallel_size={parallel.expert_parallel_size}; set launch.nproc"
                )
        elif self.world_size % parallel.expert_parallel_size:
            nproc = parallel.expert_parallel_size // math.gcd(parallel.expert_parallel_size, launch.nnodes)
            raise ConfigError(
                f"launch.nproc={launch.nproc} on launch.nnodes={launch.nnodes} is {self.world_size} ranks, which must "
                f"be a multiple of parallel.expert_parallel_size={parallel.expert_parallel_size}; "
                f"use launch.nproc={nproc}"
            )
        too_many = launch.batch_tokens > parallel.max_tokens_per_rank
        if too_many and parallel.overflow == "error" and launch.job != "script":
            raise ConfigError(
                f"launch.batch_tokens={launch.batch_tokens} exceeds "
                f"parallel.max_tokens_per_rank={parallel.max_tokens_per_rank} with parallel.overflow=error; "
                f"use at most {parallel.max_tokens_per_rank}, or parallel.overflow=chunk"
            )

    def _check_attention(self) -> None:
        attention, indexer = self.attention, self.indexer
        if attention is None:
            return
        if indexer is None:
            raise ConfigError(
                "section 'attention' needs section 'indexer', which selects its keys; add it, or leave attention out"
            )
        if attention.rope_dim > indexer.head_dim:
            raise ConfigError(
                f"attention.rope_dim={attention.rope_dim} must not exceed indexer.head_dim={indexer.head_dim}, because "
                f"the indexer turns as many elements; use at most {indexer.head_dim}"
            )
        if indexer.quantization != "none" and attention.page_size not in INDEXER_PAGES:
            raise ConfigError(
                f"attention.page_size={attention.page_size} must be one of {', '.join(map(str, INDEXER_PAGES))} with "
                f"indexer.quantization={indexer.quantization}"
            )
        if attention.kind == "compressed":
            if indexer.rope != "interleaved":
                raise ConfigError(
                    f"indexer.rope={indexer.rope} does not go with attention.kind=compressed, whose indexer turns "
                    f"interleaved pairs; use indexer.rope=interleaved"
                )
            if indexer.train:
                raise ConfigError(
                    "indexer.train=true does not go with attention.kind=compressed, which has no loss for its indexer; "
                    "use indexer.train=false"
                )

    @property
    def nproc(self) -> int:
        """Worker processes on each node."""
        return self.launch.nproc or self.parallel.expert_parallel_size // self.launch.nnodes

    @property
    def world_size(self) -> int:
        """Worker processes on all nodes."""
        return self.nproc * self.launch.nnodes

    @cached_property
    def spec(self) -> MoESpec:
        """The resolved numbers of one MoE op."""
        model, weights = self.model, self.quantization.weights
        shared: dict[str, Any] = {
            name: getattr(model, name)
            for name in (
                "hidden",
                "intermediate",
                "num_experts",
                "top_k",
                "activation",
                "swiglu_limit",
                "swiglu_alpha",
            )
        }
        # Checked here first, so that the message names the YAML's keys.
        check_op(lambda name: _YAML_KEY.get(name, f"model.{name}"), weight_format=weights, **shared)
        return MoESpec(
            **shared,
            expert_bias=model.expert_bias,
            weight_format=weights,
            act_scale="none" if weights == "none" else self.quantization.act_scale,
            weight_position=model.weight_position,
        )

    @classmethod
    def from_yaml(cls, path_or_preset: str | Path, overrides: Sequence[str] = ()) -> MoEConfig:
        """Read a configuration from a YAML file or a shipped preset.

        Args:
            path_or_preset: path of a file, or a preset by name ("quickstart"); a file that exists wins.
            overrides: `section.key=value` assignments, the values in YAML, applied in order.

        Raises:
            ConfigError: anything wrong, in one sentence.
        """
        source, text = read_source(path_or_preset)
        try:
            data = parse_yaml(text)
        except ConfigError as error:
            raise ConfigError(f"{source}: {error}") from None
        return cls.from_dict(data, source=source, overrides=overrides)

    @classmethod
    def from_dict(cls, data: Any, *, source: str = "<dict>", overrides: Sequence[str] = ()) -> MoEConfig:
        """Build a configuration from {section: {key: value}}; the arguments are those of `from_yaml`.

        Raises:
            ConfigError: anything wrong, in one sentence that begins with `source`.
        """
        try:
            sections = check_sections(apply_overrides(data, overrides, SECTIONS), SECTIONS, OPTIONAL_SECTIONS)
            built: dict[str, Any] = {
                name: None if keys is None else SECTIONS[name](**keys) for name, keys in sections.items()
            }
            return cls(**built, source=source)
        except ConfigError as error:
            message = str(error)
            # Which of the values in the message came from the command line, not from the file?
            blamed = [o for o in overrides if o.partition("=")[0] in message and not message.startswith("override ")]
            shown = " ".join(o if len(o) <= 80 else o[:77] + "..." for o in blamed)
            raise ConfigError(
                one_line(f"{source} with {shown}: {message}" if blamed else f"{source}: {message}")
            ) from None

    def to_dict(self) -> dict[str, dict[str, Any] | None]:
        """Return {section: {key: value}}, resolved; `from_dict` of it gives an equal configuration."""
        return {
            name: None if getattr(self, name) is None else dataclasses.asdict(getattr(self, name)) for name in SECTIONS
        }
