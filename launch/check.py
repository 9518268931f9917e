"""The check of job `infer`: every token of every rank, in every layer, against the float64 oracle.

Each rank keeps a copy of its own experts' weights from before the run. The tokens of the group are gathered on every
rank; each rank runs the oracle for its experts over all of them; the contributions are summed over the ranks. No rank
needs another rank's weights, and nothing that the op does (dispatch, experts, combine) is used.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megamoe.config import MoEConfig, RouterConfig
from megamoe.functional import mega_moe
from megamoe.launch.runtime import Runtime
from megamoe.layers.moe import MoELayer
from megamoe.testing.numeric import TOLERANCES, compare, row_diff
from megamoe.testing.oracle import moe_oracle, moe_oracle_exact

__all__ = ["LayerCheck", "Truth", "check_layer", "describe_tolerances", "find_culprit"]

# A single wrong weight moves a single column, which the measures over a row dilute by the square root of its length. So
# no element may be off by more than a number of root mean squares of its row. Without quantisation the rounding that
# both sides have stays below: half a BF16 step in a slot and one in y are 0.4 % of an element, and elements reach
# 5 rms: 0.02 (largest seen: 0.018).
_ELEMENT = {"bf16": 0.06, "fp32": 1e-3}
# With quantisation a value of h may round to the other E4M3 neighbour, which moves an element by 1/8 of one of the I
# terms of its sum, 1 / sqrt(I) rms each, up to 16 times the usual size where h and w2 are both 4 times theirs.
_ELEMENT_BF16_STEP, _ELEMENT_E4M3_STEP = 0.02, 2.0
# FP32 logits against float64 ones
_ROUTING = 1e-4


@dataclass(frozen=True)
class Truth:
    """One layer's parameters as they were before the run, of this rank, on the CPU.

    Attributes:
        first_expert: global id of the first expert here.
        w13, w2: `[E, 2I, H]`, `[E, H, I]`: dequantised FP32, or the parameters' own dtype where not quantised.
        biases: b13 and b2 by name, where there are any.
        router: weight, bias, e_score_correction_bias and tid2eid by name, where there are any.
        shared: w13, w2 and gate by name, where there are shared experts.
    """

    first_expert: int
    w13: Tensor
    w2: Tensor
    biases: dict[str, Tensor]
    router: dict[str, Tensor]
    shared: dict[str, Tensor]

    @staticmethod
    def of(layer: MoELayer) -> Truth:
        """Copy the parameters of a layer."""
        weights = layer.experts.weights()
        if weights.format == "none":
            w13, w2 = weights.w13, weights.w2
        else:
            w13, w2 = weights.dequantize(torch.float32)
        shared = layer.shared_experts
        return Truth(
            layer.experts.first_expert,
            _copy(w13),
            _copy(w2),
            _named(weights, "b13", "b2"),
            _named(layer.router, "weight", "bias", "e_score_correction_bias", "tid2eid"),
            {} if shared is None else _named(shared, "w13", "w2", "gate"),
        )


@dataclass(frozen=True)
class LayerCheck:
    """What the check of one layer says about this rank's tokens.

    Attributes:
        worst_row: largest row error against the oracle (`megamoe.testing.numeric.row_diff`).
        worst_element: largest error of an element, in root mean squares of its row.
        worst_exact_row: as worst_row, against maths without any rounding; for information.
        worst_token: the token to look at first.
        severity: how far out of bounds it is; above 1 is out.
        failure: what is wrong with it, None when all is well.
    """

    worst_row: float
    worst_element: float
    worst_exact_row: float
    worst_token: int
    severity: float
    failure: str | None


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().clone()


def _named(owner: Any, *names: str) -> dict[str, Tensor]:
    return {name: _copy(getattr(owner, name)) for name in names if getattr(owner, name, None) is not None}


def _kind(config: MoEConfig) -> str:
    if config.spec.weight_format != "none":
        return "quantised"
    return "fp32" if config.model.dtype == "float32" else "bf16"


def _element_bound(config: MoEConfig) -> float:
    kind = _kind(config)
    if kind == "quantised":
        return _ELEMENT_BF16_STEP + _ELEMENT_E4M3_STEP / math.sqrt(config.spec.intermediate)
    return _ELEMENT[kind]


def describe_tolerances(config: MoEConfig) -> str:
    """Return the bounds of the check in words."""
    kind = _kind(config)
    bounds = TOLERANCES[kind]
    return (
        f"{kind}: rows <= {bounds.row_diff:.0e}, all <= {bounds.diff:.0e}, scale <= {bounds.scale_error:.0e}, "
        f"elements <= {_element_bound(config):.2g} rms"
    )


def _routed(
    config: MoEConfig, runtime: Runtime, truth: Truth, x: Tensor, ids: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the routed experts' results by the oracle and by exact maths, both `[T, H]` float64. Collective."""
    spec = config.spec
    all_x, all_ids, all_weights = (runtime.gather_rows(rows) for rows in (x, ids.long(), weights))
    first = sum(len(rows) for rows in all_x[: runtime.group_rank])
    local_ids = torch.cat(all_ids) - truth.first_expert  # other ranks' experts fall outside 0..E-1
    # float64 keeps the oracle from rounding a sum that is not complete yet
    arguments = (torch.cat(all_x).double(), local_ids, torch.cat(all_weights), truth.w13, truth.w2)
    b13, b2 = truth.biases.get("b13"), truth.biases.get("b2")
    oracle = moe_oracle(
        *arguments,
        b13=b13,
        b2=b2,
        activation=spec.activation,
        limit=spec.swiglu_limit,
        alpha=spec.swiglu_alpha,
        weight_position=spec.weight_position,
        weight_format=spec.weight_format,
        act_scale=spec.act_scale,
    )
    exact = moe_oracle_exact(
        *arguments,
        b13=b13,
        b2=b2,
        activation=spec.activation,
        limit=spec.swiglu_limit,
        alpha=spec.swiglu_alpha,
    )
    both = torch.stack((oracle, exact))
    dist.all_reduce(both, group=runtime.group)
    mine = both[:, first : first + len(x)]
    return mine[0], mine[1]


def _shared(config: MoEConfig, truth: Truth, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the shared experts' result `[T, H]` float64: an expert that every token takes with weight 1.

    Args:
        dtype: the intermediate results are rounded to it; float64 for none.
    """
    if not truth.shared:
        return torch.zeros(x.shape, dtype=torch.float64)

    def rounded(values: Tensor) -> Tensor:
        return values.to(dtype).double()

    rows = x.double()
    gate, up = rounded(rows @ truth.shared["w13"].double().T).chunk(2, dim=-1)
    spec = config.spec
    if spec.activation != "silu" and spec.swiglu_limit is not None:
        gate, up = gate.clamp(max=spec.swiglu_limit), up.clamp(-spec.swiglu_limit, spec.swiglu_limit)
    if spec.activation == "swiglu_oai":
        assert spec.swiglu_alpha is not None, "the configuration resolves it"
        h = gate * torch.sigmoid(spec.swiglu_alpha * gate) * (up + 1)
    else:
        h = gate * torch.sigmoid(gate) * up
    y = rounded(rounded(h) @ truth.shared["w2"].double().T)
    if "gate" in truth.shared:
        y = torch.sigmoid(rows @ truth.shared["gate"].double().T) * y
    return y


def _check_routing(
    router: RouterConfig, truth: Truth, x: Tensor, ids: Tensor, weights: Tensor, input_ids: Tensor
) -> tuple[Tensor, str]:
    """Compare choice and weights with float64 scores; return each token's error over its bound, and what it means."""
    logits = x.double() @ truth.router["weight"].double().T
    if "bias" in truth.router:
        logits = logits + truth.router["bias"].double()
    known = ids >= 0
    chosen = logits.gather(1, ids.clamp(min=0))
    # log scores keep ratios of tiny scores
    if router.score == "sigmoid":
        log_scores, log_chosen = (torch.nn.functional.logsigmoid(z) for z in (logits, chosen))
    elif router.score == "sqrtsoftplus":
        log_scores, log_chosen = (torch.log(torch.nn.functional.softplus(z)) / 2 for z in (logits, chosen))
    else:
        log_scores, log_chosen = logits.log_softmax(-1), chosen - logits.logsumexp(-1, keepdim=True)
    log_chosen = log_chosen.masked_fill(~known, -math.inf)
    if router.renormalize or router.score == "topk_softmax":
        log_chosen = log_chosen - log_chosen.logsumexp(-1, keepdim=True)
    expected = router.scale * log_chosen.exp()
    error = ((weights.double() - expected).abs() / (expected.abs() + 1e-6)).masked_fill(~known, 0.0)
    severity = error.amax(-1) / _ROUTING

    if router.select == "hash":
        wrong = (ids != truth.router["tid2eid"][input_ids]).any(-1)
        severity = torch.where(wrong, math.inf, severity)
    elif router.groups == 1:
        # An expert that was left out may not be better than one that was taken, beyond the rounding of the logits.
        keys = log_scores.exp()
        if router.score == "topk_softmax":
            keys = logits
        if "e_score_correction_bias" in truth.router:
            keys = keys + truth.router["e_score_correction_bias"].double()
        best_left = keys.scatter(1, ids, -math.inf).amax(-1)
        worst_taken = keys.gather(1, ids).amin(-1)
        gap = (best_left - worst_taken) / (best_left.abs() + worst_taken.abs() + 1e-6)
        severity = torch.maximum(severity, gap / _ROUTING)
        repeated = (ids.sort(-1).values.diff(dim=-1) == 0).any(-1)
        severity = torch.where(repeated, math.inf, severity)
    return severity, "experts or routing weights differ from float64 scores"


def check_layer(
    config: MoEConfig,
    runtime: Runtime,
    truth: Truth,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    y: Tensor,
    input_ids: Tensor,
) -> LayerCheck:
    """Check one call of one layer. Collective over the expert-parallel group.

    Args:
        config: of the layer.
        runtime: this rank's place.
        truth: the layer's parameters.
        x: `[T, H]`, what the layer was given.
        ids, weights: `[T, K]`, where its router sent the tokens.
        y: `[T, H]`, what it returned.
        input_ids: `[T]`, byte values, for hash routing.
    """
    oracle, exact = _routed(config, runtime, truth, x, ids, weights)
    x, ids, weights, y, input_ids = (part.cpu() for part in (x, ids, weights, y, input_ids))
    oracle = oracle + _shared(config, truth, x, y.dtype)
    exact = exact + _shared(config, truth, x, torch.float64)
    if not len(x):
        return LayerCheck(0.0, 0.0, 0.0, 0, 0.0, None)

    kind = _kind(config)
    bounds = TOLERANCES[kind]
    element_bound = _element_bound(config)
    verdict = compare(y, oracle, kind, exact=exact)
    error = (y.double() - oracle).abs()
    elements = error.amax(-1) / (oracle.square().mean(-1).sqrt() + 1e-30)
    rows = row_diff(y, oracle)
    routing, routing_text = _check_routing(config.router, truth, x, ids, weights, input_ids)
    # Each measure over its bound; NaN counts as infinite.
    measures = torch.stack((rows / bounds.row_diff, elements / element_bound, routing)).nan_to_num(nan=math.inf)
    token = int(measures.amax(0).argmax())
    severity = float(measures[:, token].max())
    failure = None
    if severity > 1:
        failure = (
            f"row error {float(rows[token]):.1e} (bound {bounds.row_diff:.0e}), largest element error "
            f"{float(elements[token]):.2g} rms (bound {element_bound:.2g})"
        )
        if float(measures[2, token]) == severity:
            failure = routing_text
    elif not verdict.ok:
        severity, failure = math.inf, verdict.text
    return LayerCheck(
        float(rows.nan_to_num(nan=math.inf).max()),
        float(elements.nan_to_num(nan=math.inf).max()),
        float(row_diff(y, exact).nan_to_num(nan=math.inf).max()),
        token,
        severity,
        failure,
    )


def find_culprit(
    config: MoEConfig,
    runtime: Runtime,
    layer: MoELayer,
    truth: Truth,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    owner: int,
    token: int,
) -> str | None:
    """Send one token through each of its experts alone, and name the expert that errs most.

    Collective over the expert-parallel group of the owner; the other groups return at once.

    Args:
        layer: the layer at fault.
        owner: rank of the world that holds the token.
        token: index of the token there.

    Returns:
        a sentence on the owner, None elsewhere.
    """
    if owner // runtime.group_size != runtime.group_index:
        return None
    assert layer.context is not None, "the layer has just run"
    take = slice(token, token + 1) if runtime.rank == owner else slice(0, 0)
    results = []
    for k_idx in range(ids.shape[1]):
        one = torch.full_like(ids[take], -1)
        one[:, k_idx] = ids[take, k_idx]
        actual = mega_moe(x[take], one, weights[take], layer.experts.operands(), layer.context)
        expected, _ = _routed(config, runtime, truth, x[take], one, weights[take])
        if runtime.rank == owner:
            size = float(expected.norm())
            error = float((actual.cpu().double() - expected).norm())
            results.append((math.inf if math.isnan(error) else error, size, int(one[0, k_idx])))
    if runtime.rank != owner:
        return None
    error, size, expert = max(results)
    relative = error / size if size else math.inf
    if relative < math.sqrt(2 * TOLERANCES[_kind(config)].diff):
        return "each of its experts alone is right, so the fault is in the sum or in the shared experts"
    place = owner - runtime.group_rank + expert // layer.experts.num_local_experts
    return f"expert {expert} on rank {place} is at fault: alone it is off by {100 * relative:.1f} % of its result"
