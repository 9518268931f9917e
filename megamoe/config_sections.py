"""The sections of the configuration and the resolved numbers of one MoE op: what each value means and may be.

Every dataclass is frozen, takes keyword arguments only and checks itself; `megamoe.config` puts them together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megamoe.config_schema import check_fields, choice, flag, number, size
from megamoe.errors import ConfigError

__all__ = [
    "OPTIONAL_SECTIONS",
    "ATTENTION_KEYS",
    "SECTIONS",
    "AttentionConfig",
    "IndexerConfig",
    "KernelConfig",
    "LaunchConfig",
    "MoESpec",
    "ModelConfig",
    "ParallelConfig",
    "QuantizationConfig",
    "RouterConfig",
    "check_op",
    "local_expert_range",
    "refuse_uneven_split",
    "valid_expert_parallel_sizes",
]

MAX_TOP_K = 16
MAX_EXPERTS = 1024
INDEXER_HEADS, INDEXER_DIMS, INDEXER_PAGES = (8, 16, 32, 64), (32, 64, 128), (16, 32, 64, 128, 256)  # of the kernels
MAX_KEPT_KEYS = 2048  # what the top-k kernel finds in one pass
MXFP4_GROUP = 32  # elements along K that share one scale (OCP Microscaling Formats specification 1.0)
SWIGLU_OAI_ALPHA = 1.702  # sigmoid(1.702 x) * x approximates GELU; the value that gpt-oss was trained with

ACTIVATIONS = ("silu", "swiglu_clamp", "swiglu_oai")
WEIGHT_FORMATS = ("none", "fp8_block", "mxfp4")
WEIGHT_POSITIONS = ("after", "before")
# act_scale="auto": the recipe of the published checkpoints in that weight format
_ACT_SCALE_OF = {"none": "none", "fp8_block": "block128", "mxfp4": "token"}


def valid_expert_parallel_sizes(num_experts: int, limit: int = 64) -> list[int]:
    """Return the divisors of `num_experts` up to `limit`: the numbers of ranks that experts can be split over."""
    return [n for n in range(1, min(num_experts, limit) + 1) if num_experts % n == 0]


def refuse_uneven_split(num_experts: int, ranks: int, experts_key: str, ranks_key: str) -> None:
    """Raise `ConfigError` when `ranks` does not divide `num_experts`; the keys name both in the message."""
    if num_experts % ranks:
        valid = valid_expert_parallel_sizes(num_experts)
        raise ConfigError(
            f"{experts_key}={num_experts} is not divisible by {ranks_key}={ranks}; "
            f"valid sizes are {', '.join(map(str, valid))}"
        )


def local_expert_range(num_experts: int, rank: int, world_size: int) -> tuple[int, int]:
    """Return the experts that a rank owns.

    Args:
        num_experts: experts of the layer, over all ranks.
        rank: rank within the expert-parallel group, 0 <= rank < world_size.
        world_size: ranks in the expert-parallel group.

    Returns:
        (first, last): the half-open range of global expert ids, first included, last excluded.

    Raises:
        ConfigError: `world_size` does not divide `num_experts`.
        ValueError: a rank outside the group.
    """
    if world_size < 1 or not 0 <= rank < world_size:
        raise ValueError(f"rank must be in [0, world_size), got rank={rank} and world_size={world_size}")
    refuse_uneven_split(num_experts, world_size, "num_experts", "world_size")
    num_local = num_experts // world_size
    return rank * num_local, (rank + 1) * num_local


def check_op(
    key: Callable[[str], str],
    *,
    hidden: int,
    intermediate: int,
    num_experts: int,
    top_k: int,
    activation: str,
    swiglu_limit: float | None,
    swiglu_alpha: float | None,
    weight_format: str,
) -> None:
    """Raise `ConfigError` when the numbers of one MoE op do not fit together; `key` names them for the message."""
    if top_k > num_experts:
        raise ConfigError(
            f"{key('top_k')}={top_k} must not exceed {key('num_experts')}={num_experts}; use at most {num_experts}"
        )
    if activation == "silu" and swiglu_limit is not None:
        raise ConfigError(
            f"{key('swiglu_limit')}={swiglu_limit} has no meaning with {key('activation')}=silu, which does not clamp; "
            f"use {key('activation')}=swiglu_clamp or leave the limit out"
        )
    if activation != "swiglu_oai" and swiglu_alpha is not None:
        raise ConfigError(
            f"{key('swiglu_alpha')}={swiglu_alpha} has no meaning with {key('activation')}={activation}; "
            f"use {key('activation')}=swiglu_oai or leave alpha out"
        )
    if weight_format == "mxfp4":
        for name, value in (("hidden", hidden), ("intermediate", intermediate)):
            if value % MXFP4_GROUP:
                near = max(MXFP4_GROUP, round(value / MXFP4_GROUP) * MXFP4_GROUP)
                raise ConfigError(
                    f"{key(name)}={value} must be divisible by {MXFP4_GROUP} with {key('weight_format')}=mxfp4, whose "
                    f"scales cover {MXFP4_GROUP} elements; the nearest valid value is {near}"
                )


@dataclass(frozen=True, kw_only=True)
class MoESpec:
    """The resolved numbers of one MoE op; what a kernel needs to know and nothing else.

    Args:
        hidden: width of a token, elements.
        intermediate: width of one expert's intermediate row, elements.
        num_experts: experts over all ranks.
        top_k: experts per token.
        activation: "silu", "swiglu_clamp" or "swiglu_oai".
        swiglu_limit: clamp of the two swiglu activations; None = no clamp.
        swiglu_alpha: of swiglu_oai only; None becomes 1.702 there.
        expert_bias: whether both linears have a bias.
        weight_format: "none", "fp8_block" or "mxfp4".
        act_scale: "none", "token" or "block128"; "auto" becomes the recipe of the weight format.
        weight_position: routing weight "after" or "before" the second linear.

    Raises:
        ConfigError: a value that no backend can run.
    """

    hidden: int = size()
    intermediate: int = size()
    num_experts: int = size(high=MAX_EXPERTS)
    top_k: int = size(high=MAX_TOP_K)
    activation: str = choice(*ACTIVATIONS, default="silu")
    swiglu_limit: float | None = number(None, above=0.0)
    swiglu_alpha: float | None = number(None, above=0.0)
    expert_bias: bool = flag(False)
    weight_format: str = choice(*WEIGHT_FORMATS, default="none")
    act_scale: str = choice("auto", "none", "token", "block128", default="auto")
    weight_position: str = choice(*WEIGHT_POSITIONS, default="after")

    def __post_init__(self) -> None:
        check_fields(self, "MoESpec")
        check_op(
            lambda name: f"MoESpec.{name}",
            hidden=self.hidden,
            intermediate=self.intermediate,
            num_experts=self.num_experts,
            top_k=self.top_k,
            activation=self.activation,
            swiglu_limit=self.swiglu_limit,
            swiglu_alpha=self.swiglu_alpha,
            weight_format=self.weight_format,
        )
        if self.activation == "swiglu_oai" and self.swiglu_alpha is None:
            object.__setattr__(self, "swiglu_alpha", SWIGLU_OAI_ALPHA)
        if self.act_scale == "auto":
            object.__setattr__(self, "act_scale", _ACT_SCALE_OF[self.weight_format])
        elif (self.act_scale == "none") != (self.weight_format == "none"):
            raise ConfigError(
                f"MoESpec.act_scale={self.act_scale} does not go with MoESpec.weight_format={self.weight_format}: "
                f"activations are quantised exactly when the weights are; use {_ACT_SCALE_OF[self.weight_format]}"
            )


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Section `model`: the sizes and the maths of one MoE layer.

    Args:
        hidden, intermediate, num_experts, top_k, activation, swiglu_limit, swiglu_alpha, expert_bias,
            weight_position: as in `MoESpec`.
        shared_experts: experts that every token passes through; 0 = none.
        shared_intermediate: their width in all, elements; None = intermediate * shared_experts.
        shared_gate: multiply the shared output by sigmoid(x . gate).
        dtype: "bfloat16" or "float32", of activations and of parameters that are not quantised.
        vocab_size: number of token ids, needed by `router.select: hash` only.
    """

    hidden: int = size()
    intermediate: int = size()
    num_experts: int = size(high=MAX_EXPERTS)
    top_k: int = size(high=MAX_TOP_K)
    activation: str = choice(*ACTIVATIONS, default="silu")
    swiglu_limit: float | None = number(None, above=0.0)
    swiglu_alpha: float | None = number(None, above=0.0)
    expert_bias: bool = flag(False)
    shared_experts: int = size(0, low=0, high=MAX_EXPERTS)
    shared_intermediate: int | None = size(None)
    shared_gate: bool = flag(False)
    weight_position: str = choice(*WEIGHT_POSITIONS, default="after")
    dtype: str = choice("bfloat16", "float32", default="bfloat16")
    vocab_size: int | None = size(None, high=1 << 31)

    def __post_init__(self) -> None:
        check_fields(self, "model")
        if self.shared_experts == 0:
            for name in ("shared_intermediate", "shared_gate"):
                if getattr(self, name):
                    raise ConfigError(f"model.{name} needs model.shared_experts >= 1, got 0")

    @property
    def shared_width(self) -> int:
        """Intermediate width of the shared experts in all, elements; 0 without shared experts."""
        return self.shared_intermediate or self.intermediate * self.shared_experts


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """Section `router`: how a token chooses its experts.

    Args:
        score: "softmax", "topk_softmax" (softmax over the chosen logits), "sigmoid" or "sqrtsoftplus".
        select: "topk", or "hash" (ids from a table by token id, weights from the scores).
        bias: add `e_score_correction_bias` to the scores for the choice only.
        logit_bias: add a learned bias to the logits.
        groups: groups that the experts are split into; 1 = no group limit.
        topk_groups: groups that a token may choose from.
        group_reduce: score of a group: sum of its two best ("top2") or its best ("max").
        renormalize: divide the chosen weights by their sum.
        scale: factor on the weights, last.
        aux_loss: coefficient of the load-balancing loss; 0 = none.
    """

    score: str = choice("softmax", "topk_softmax", "sigmoid", "sqrtsoftplus")
    select: str = choice("topk", "hash", default="topk")
    bias: bool = flag(False)
    logit_bias: bool = flag(False)
    groups: int = size(1, high=MAX_EXPERTS)
    topk_groups: int = size(1, high=MAX_EXPERTS)
    group_reduce: str = choice("top2", "max", default="top2")
    renormalize: bool = flag(True)
    scale: float = number(1.0, above=0.0)
    aux_loss: float = number(0.0, low=0.0)

    def __post_init__(self) -> None:
        check_fields(self, "router")
        if self.topk_groups > self.groups:
            raise ConfigError(
                f"router.topk_groups={self.topk_groups} must not exceed router.groups={self.groups}; "
                f"use at most {self.groups}"
            )


@dataclass(frozen=True, kw_only=True)
class QuantizationConfig:
    """Section `quantization`: number formats of expert weights and of the activations that meet them.

    Args:
        weights: "none", "fp8_block" or "mxfp4"; "auto" = mxfp4, and none when `launch.job` is train. A `MoEConfig`
            holds the resolved value, never "auto".
        act_scale: one FP32 scale per "token" or per token and 128 columns ("block128"); "auto" = the recipe of the
            weight format. With weights "none" no activation is quantised.
    """

    weights: str = choice(*WEIGHT_FORMATS, "auto", default="none")
    act_scale: str = choice("auto", "token", "block128", default="auto")

    def __post_init__(self) -> None:
        check_fields(self, "quantization")


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Section `parallel`: how experts and tokens are spread over ranks.

    Args:
        expert_parallel_size: ranks that share the experts of a layer.
        max_tokens_per_rank: tokens of one call on one rank; sizes the workspace.
        overflow: more tokens than that are done in several calls ("chunk") or refused ("error").
        comm: symmetric memory: "auto", "local" (one rank), "shm", "symm_mem" or "nvshmem".
        replicated_input: the ranks hold the same tokens; each works on its share and the results are gathered.
        timeout_s: bound of every wait on another rank, seconds.
    """

    expert_parallel_size: int = size(1, high=MAX_EXPERTS)
    max_tokens_per_rank: int = size(8192)
    overflow: str = choice("chunk", "error", default="chunk")
    comm: str = choice("auto", "local", "shm", "symm_mem", "nvshmem", default="auto")
    replicated_input: bool = flag(False)
    timeout_s: float = number(600.0, above=0.0, high=1e6)

    def __post_init__(self) -> None:
        check_fields(self, "parallel")
        if self.comm == "local" and self.expert_parallel_size > 1:
            raise ConfigError(
                f"parallel.comm=local holds one rank, and parallel.expert_parallel_size is "
                f"{self.expert_parallel_size}; use parallel.comm=auto"
            )


@dataclass(frozen=True, kw_only=True)
class KernelConfig:
    """Section `kernel`.

    Args:
        backend: "auto", "sm90", "cpu" or "reference"; a named backend that cannot run raises.
        check: checked mode: ids, ranges and the order of collective calls are verified.
    """

    backend: str = choice("auto", "sm90", "cpu", "reference", default="auto")
    check: bool = flag(False)

    def __post_init__(self) -> None:
        check_fields(self, "kernel")


@dataclass(frozen=True, kw_only=True)
class IndexerConfig:
    """Section `indexer`: the lightning indexer of sparse attention.

    Args:
        heads: query heads of the indexer.
        head_dim: width of a head, elements.
        top_k: keys that a query keeps.
        rope: rotary pairs: "half" (i with i + n/2) or "interleaved" (2i with 2i + 1).
        quantization: of queries and keys: "none", "fp8" (E4M3, a scale per row) or "mxfp4" (E2M1, a scale per 32).
        hadamard: turn queries and keys by an orthonormal Hadamard matrix first: scores stay, outliers are spread.
        train: give the indexer a loss of its own, see `IndexerAttention.indexer_loss`; without it nothing trains it.
        max_logits_mib: bound of the scores held at a time, MiB.
    """

    heads: int = size()
    head_dim: int = size()
    top_k: int = size(high=MAX_KEPT_KEYS)
    rope: str = choice("half", "interleaved", default="half")
    quantization: str = choice("none", "fp8", "mxfp4", default="none")
    hadamard: bool = flag(False)
    train: bool = flag(False)
    max_logits_mib: int = size(1024)

    def __post_init__(self) -> None:
        check_fields(self, "indexer")
        _check_even("indexer.head_dim", self.head_dim)
        if self.hadamard and self.head_dim & (self.head_dim - 1):
            raise ConfigError(
                f"indexer.head_dim={self.head_dim} must be a power of two with indexer.hadamard=true; the nearest "
                f"valid value is {_nearest_power(self.head_dim)}"
            )
        if self.quantization != "none":
            for key, value, valid in (("heads", self.heads, INDEXER_HEADS), ("head_dim", self.head_dim, INDEXER_DIMS)):
                if value not in valid:
                    raise ConfigError(
                        f"indexer.{key}={value} must be one of {', '.join(map(str, valid))} with "
                        f"indexer.quantization={self.quantization}"
                    )
        if self.train and self.quantization != "none":
            raise ConfigError(
                f"indexer.train=true needs indexer.quantization=none, got {self.quantization}, because quantised "
                f"scores have no gradient; set indexer.quantization=none"
            )


# attention.kind -> the keys that it needs beside those which all kinds have
ATTENTION_KEYS = {
    "mla": ("kv_lora", "nope_dim", "value_dim"),
    "gqa": ("kv_heads", "head_dim"),
    "compressed": ("head_dim", "window", "output_groups", "output_lora"),
}


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """Section `attention`: the attention that the indexer selects keys for.

    Args:
        kind: "mla" (latent keys and values: DeepSeek-V3.2, GLM-DSA), "gqa" (grouped heads) or "compressed" (a sliding
            window and compressed entries of 4 tokens: DeepSeek-V4).
        heads: query heads.
        q_lora: width of the latent that queries are projected from.
        rope_dim: elements of a head that rotary embeddings turn, of the attention and of the indexer.
        kv_lora, nope_dim, value_dim: mla: width of the latent of keys and values; elements of a query head that are
            not turned; width of a value head.
        kv_heads: gqa: heads of keys and values.
        head_dim: gqa, compressed: width of a head, turned elements included.
        window, output_groups, output_lora: compressed: tokens of the sliding window, the query's own included; groups
            of heads that the output projection takes apart, and the width that each group is brought to.
        rope: rotary pairs of the attention: "half" (i with i + n/2) or "interleaved" (2i with 2i + 1).
        rope_theta: base of the rotary frequencies.
        yarn_factor: by how much YaRN stretches the context (arXiv:2309.00071); 1 = plain rotary embeddings.
        yarn_context: tokens of the context before it was stretched.
        yarn_fast, yarn_slow: turns over `yarn_context` above which a frequency stays, and below which it is divided.
        yarn_mscale: the scale of the logits is multiplied by (0.1 yarn_mscale ln(yarn_factor) + 1)^2.
        norm_eps: of the norms.
        page_size: tokens of one page of the cache.
    """

    kind: str = choice("mla", "gqa", "compressed", default="mla")
    heads: int = size(high=1024)
    q_lora: int = size()
    rope_dim: int = size()
    kv_lora: int | None = size(None)
    nope_dim: int | None = size(None)
    value_dim: int | None = size(None)
    kv_heads: int | None = size(None, high=1024)
    head_dim: int | None = size(None)
    window: int | None = size(None)
    output_groups: int | None = size(None, high=1024)
    output_lora: int | None = size(None)
    rope: str = choice("half", "interleaved", default="interleaved")
    rope_theta: float = number(10000.0, above=0.0)
    yarn_factor: float = number(1.0, low=1.0)
    yarn_context: int = size(4096, high=1 << 31)
    yarn_fast: float = number(32.0, above=0.0)
    yarn_slow: float = number(1.0, above=0.0)
    yarn_mscale: float = number(0.0, low=0.0)
    norm_eps: float = number(1e-6, above=0.0)
    page_size: int = size(64, high=256)

    def __post_init__(self) -> None:
        check_fields(self, "attention")
        needed = ATTENTION_KEYS[self.kind]
        for name in sorted({key for keys in ATTENTION_KEYS.values() for key in keys}):
            value = getattr(self, name)
            if name in needed and value is None:
                raise ConfigError(f"attention.{name} is missing; attention.kind={self.kind} needs {', '.join(needed)}")
            if name not in needed and value is not None:
                raise ConfigError(
                    f"attention.{name}={value} has no meaning with attention.kind={self.kind}, which takes "
                    f"{', '.join(needed)}; leave it out"
                )
        _check_even("attention.rope_dim", self.rope_dim)
        if self.head_dim is not None and self.rope_dim > self.head_dim:
            raise ConfigError(
                f"attention.rope_dim={self.rope_dim} must not exceed attention.head_dim={self.head_dim}; "
                f"use at most {self.head_dim}"
            )
        for name, divisor in (("kv_heads", self.kv_heads), ("output_groups", self.output_groups)):
            if divisor is not None and self.heads % divisor:
                valid = ", ".join(str(n) for n in range(1, self.heads + 1) if self.heads % n == 0)
                raise ConfigError(
                    f"attention.{name}={divisor} does not divide attention.heads={self.heads}; valid values are {valid}"
                )
        if self.kind == "compressed" and self.rope != "interleaved":
            raise ConfigError(
                "attention.rope=half has no meaning with attention.kind=compressed, which turns interleaved pairs; "
                "leave it out"
            )
        if self.yarn_slow >= self.yarn_fast:
            raise ConfigError(
                f"attention.yarn_slow={self.yarn_slow:g} must be below attention.yarn_fast={self.yarn_fast:g}"
            )

    @property
    def query_dim(self) -> int:
        """Width of a query head, elements."""
        return (self.nope_dim or 0) + self.rope_dim if self.head_dim is None else self.head_dim


def _check_even(key: str, value: int) -> None:
    """Raise ConfigError for an odd width that rotary embeddings turn."""
    if value % 2:
        raise ConfigError(
            f"{key}={value} must be even, because rotary embeddings turn pairs of elements; "
            f"the nearest valid value is {value + 1}"
        )


def _nearest_power(value: int) -> int:
    """Return the power of two nearest to a positive integer."""
    below = 1 << (value.bit_length() - 1)
    return below if value - below <= 2 * below - value else 2 * below


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """Section `launch`: the job that `megamoe launch` starts.

    Args:
        nproc: worker processes on each node; None = expert_parallel_size / nnodes (see `MoEConfig.nproc`).
        nnodes: machines.
        job: "infer", "train" or "script".
        layers: MoE layers of the model that the job builds.
        steps: training steps.
        batch_tokens: tokens of one batch on each rank.
        learning_rate: of the optimizer.
        seed: of parameters and data.
    """

    nproc: int | None = size(None, high=MAX_EXPERTS)
    nnodes: int = size(1, high=MAX_EXPERTS)
    job: str = choice("infer", "train", "script", default="infer")
    layers: int = size(2, high=1024)
    steps: int = size(200, high=1 << 31)
    batch_tokens: int = size(512)
    learning_rate: float = number(3e-3, above=0.0)
    seed: int = size(0, low=0, high=(1 << 63) - 1)

    def __post_init__(self) -> None:
        check_fields(self, "launch")


# section -> its dataclass, in the order of the YAML
SECTIONS: dict[str, type] = {
    "model": ModelConfig,
    "router": RouterConfig,
    "quantization": QuantizationConfig,
    "parallel": ParallelConfig,
    "kernel": KernelConfig,
    "indexer": IndexerConfig,
    "attention": AttentionConfig,
    "launch": LaunchConfig,
}
OPTIONAL_SECTIONS = ("indexer", "attention")
