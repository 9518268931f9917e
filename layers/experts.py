"""The routed experts of one rank as a module, whatever the number format.

For inference a backend's packed form can take the place of the canonical matrices; whoever asks for a state dict or for
`weights()` gets canonical tensors all the same, byte for byte.

Shape letters: E local experts, I intermediate, H hidden.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from megamoe.config import MoESpec
from megamoe.kernels.weights import ExpertLayout, ExpertWeights, quantize_experts
from megamoe.progress import conversion_bar

__all__ = ["Experts", "is_expert_parallel"]

_NAMES = ("w13", "w2", "w13_scale", "w2_scale", "b13", "b2")
_MATRICES = ("w13", "w2")
_CANONICAL_DIM = 3  # of a matrix; packed it has 2
_converting = threading.Lock()
# E4M3 counts as codes, although torch calls it floating
_FLOATING = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def is_expert_parallel(param: Tensor) -> bool:
    """Return True for a parameter that only this rank holds, as opposed to one replicated over the group."""
    return bool(getattr(param, "megamoe_expert_parallel", False))


class Experts(nn.Module):
    """The experts that one rank owns.

    Parameters (each marked `megamoe_expert_parallel = True`; those of a quantised format have no gradient):
        w13: `[E, 2I, H]`, gate rows first; codes in the canonical layout of the format.
        w2: `[E, H, I]`, or codes.
        w13_scale, w2_scale: scales of a quantised format.
        b13, b2: `[E, 2I]`, `[E, H]`, with `expert_bias`.

    While `layout` is set, w13, w2 and their scales hold that layout instead: `[E, n]`, the same dtypes.

    Attributes:
        layout: the packed layout of the matrices; None = canonical.

    Args:
        spec: sizes, format, biases.
        num_local_experts: E.
        dtype: of parameters that are not quantised.
        device: where they live.
        first_expert: global id of the first local expert; it seeds the initial values.
    """

    w13: nn.Parameter
    w2: nn.Parameter
    w13_scale: nn.Parameter | None
    w2_scale: nn.Parameter | None
    b13: nn.Parameter | None
    b2: nn.Parameter | None

    def __init__(
        self,
        spec: MoESpec,
        num_local_experts: int,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
        *,
        first_expert: int = 0,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.num_local_experts = num_local_experts
        self.first_expert = first_expert
        self.layout: ExpertLayout | None = None
        shapes = _parameters(spec, num_local_experts, dtype)
        for name in _NAMES:
            if name not in shapes:
                self.register_parameter(name, None)
                continue
            shape, param_dtype = shapes[name]
            # ordinary tensors even under inference_mode: backends see by their version count when a weight has changed
            with torch.inference_mode(False):
                tensor = torch.zeros(shape, dtype=param_dtype, device=device)
                self.register_parameter(name, nn.Parameter(tensor, requires_grad=spec.weight_format == "none"))
        self._mark()

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of w13: the parameters' own, or that of the codes."""
        return self.w13.dtype

    def operands(self) -> ExpertWeights:
        """Return the parameters as they are, canonical or packed; nothing is copied."""
        return ExpertWeights(
            self.w13, self.w2, self.w13_scale, self.w2_scale, self.b13, self.b2, self.spec.weight_format
        )

    def weights(self, first: int = 0, last: int | None = None) -> ExpertWeights:
        """Return the experts in the canonical layout: the parameters themselves, or copies while they are packed.

        Args:
            first, last: half-open range of local indices; all of them by default.
        """
        chosen = self.operands()
        if first or last is not None:
            chosen = chosen.select(first, self.num_local_experts if last is None else last)
        if self.layout is None:
            return chosen
        parts = {name: getattr(chosen, name) for name in ("b13", "b2")}
        for name in _MATRICES:
            codes, scale = getattr(chosen, name), getattr(chosen, f"{name}_scale")
            if codes.dim() == _CANONICAL_DIM:  # someone has put it there since
                parts[name], parts[f"{name}_scale"] = codes, scale
                continue
            parts[name], parts[f"{name}_scale"] = self.layout.unpack(name, codes, scale, self.spec)
        return ExpertWeights(**parts, format=self.spec.weight_format)

    def pack_(self, layout: ExpertLayout) -> None:
        """Put the matrices into a backend's layout, and let the canonical ones go. For inference.

        Tensors that were taken out before (a state dict, say) keep their canonical values and their memory.

        Raises:
            ValueError: they are packed in another layout, or a canonical one has a wrong shape or dtype.
        """
        if self.layout is not None and self.layout.layout_id != layout.layout_id:
            raise ValueError(f"pack_: packed as {self.layout.layout_id}, got {layout.layout_id}; call unpack_() first")
        with _converting:  # another thread may be about to do the same
            if self.layout is None:
                if all(getattr(self, name).dim() == _CANONICAL_DIM for name in _MATRICES):
                    self.operands().validate(self.spec, self.num_local_experts)
                self._convert("packing", layout.pack)
                self.layout = layout

    def unpack_(self) -> None:
        """Put the matrices back into the canonical layout, byte for byte."""
        if self.layout is not None:
            self._convert("unpacking", self.layout.unpack)
            self.layout = None

    def _convert(self, verb: str, convert: Callable[..., tuple[Tensor, Tensor | None]]) -> None:
        """Convert one matrix after the other, so that two forms of one of them is all that there ever is at once."""
        num = self.num_local_experts
        label = f"{verb} experts {self.first_expert}..{self.first_expert + num - 1}"
        with torch.no_grad(), conversion_bar(label, 2 * num) as show:
            for index, name in enumerate(_MATRICES):
                progress = None if show is None else _shifted(show, index * num)
                codes, scale = getattr(self, name), getattr(self, f"{name}_scale")
                # done already: a conversion was interrupted behind it, or another layer has the same parameter
                if (codes.dim() == _CANONICAL_DIM) == (verb == "unpacking"):
                    continue
                self._put(name, *convert(name, codes.detach(), scale, self.spec, progress=progress))

    def _put(self, name: str, codes: Tensor, scale: Tensor | None) -> None:
        """Exchange what is behind a matrix's parameters; the parameters stay the same objects."""
        getattr(self, name).data = codes
        if scale is not None:
            getattr(self, f"{name}_scale").data = scale

    @torch.no_grad()
    def reset_parameters(self, seed: int = 0) -> None:
        """Draw the weights from N(0, 1 / fan_in) and zero the biases.

        Each expert is drawn from a generator seeded by `seed` and its global id, so its values do not depend on how
        many ranks share the layer.
        """
        spec, device = self.spec, self.w13.device
        if device.type == "meta":
            return
        dtype = torch.float32 if spec.weight_format != "none" else self.w13.dtype
        generator = torch.Generator(device=device)
        for index in range(self.num_local_experts):
            # an odd multiplier keeps neighbouring seeds apart for every pair of layers
            generator.manual_seed((seed * 0x9E3779B1 + self.first_expert + index) & (2**63 - 1))
            w13 = torch.randn(2 * spec.intermediate, spec.hidden, generator=generator, device=device)
            w2 = torch.randn(spec.hidden, spec.intermediate, generator=generator, device=device)
            self.load_expert(
                self.first_expert + index,
                w13=(w13 * spec.hidden**-0.5).to(dtype),
                w2=(w2 * spec.intermediate**-0.5).to(dtype),
            )
        for bias in (self.b13, self.b2):
            if bias is not None:
                bias.zero_()

    @torch.no_grad()
    def load_expert(
        self,
        expert_id: int,
        *,
        w13: Tensor | None = None,
        w2: Tensor | None = None,
        w13_scale: Tensor | None = None,
        w2_scale: Tensor | None = None,
        b13: Tensor | None = None,
        b2: Tensor | None = None,
    ) -> None:
        """Overwrite one expert in place; addresses stay, so captured graphs and optimizers stay valid.

        Args:
            expert_id: global id, one of this rank's experts.
            w13: `[2I, H]` floating, or codes of this format together with `w13_scale`.
            w2: `[H, I]` floating, or codes of this format together with `w2_scale`.
            w13_scale, w2_scale: canonical scales of codes.
            b13, b2: `[2I]`, `[H]` floating.

        Raises:
            ValueError: the expert lives on another rank, a shape does not fit, or codes come without scales.
        """
        index = expert_id - self.first_expert
        if not 0 <= index < self.num_local_experts:
            last = self.first_expert + self.num_local_experts - 1
            raise ValueError(f"expert_id: this rank holds experts {self.first_expert} to {last}, got {expert_id}")
        given = {"w13": w13, "w2": w2, "w13_scale": w13_scale, "w2_scale": w2_scale, "b13": b13, "b2": b2}
        for name in ("w13", "w2"):
            self._canonical(name, given)
        # everything is checked before anything is written: a refused call leaves the expert as it was
        expert = self.weights(index, index + 1)
        for name, tensor in given.items():
            if tensor is None:
                continue
            param = getattr(expert, name)
            if param is None:
                raise ValueError(f"{name}: this layer has none (format {self.spec.weight_format})")
            if tensor.shape != param.shape[1:]:
                raise ValueError(f"{name}: expected {list(param.shape[1:])}, got {list(tensor.shape)}")
        for name, tensor in given.items():
            if tensor is not None:
                getattr(expert, name)[0].copy_(tensor)
        if self.layout is None:
            return
        for name in _MATRICES:
            if given[name] is not None:
                scale = getattr(expert, f"{name}_scale")
                codes, scale = self.layout.pack(name, getattr(expert, name), scale, self.spec)
                getattr(self, name)[index].copy_(codes[0])
                if scale is not None:
                    getattr(self, f"{name}_scale")[index].copy_(scale[0])

    def _canonical(self, name: str, given: dict[str, Tensor | None]) -> None:
        """Quantise `given[name]` if it is floating and the format is not; check that codes come with their scales."""
        tensor, scale = given[name], given[f"{name}_scale"]
        spec = self.spec
        if spec.weight_format == "none":
            if tensor is not None and tensor.dtype not in _FLOATING:
                raise ValueError(f"{name}: expected floating values, got {tensor.dtype}")
            return
        if tensor is None:
            if scale is not None:
                raise ValueError(f"{name}_scale: scales go with their codes; pass {name} too")
            return
        param = getattr(self, name)
        if tensor.dtype == param.dtype:
            if scale is None:
                raise ValueError(f"{name}: codes in {tensor.dtype} need {name}_scale")
            return
        if not tensor.is_floating_point() or scale is not None:
            raise ValueError(
                f"{name}: expected floating values, or {param.dtype} codes with {name}_scale, got {tensor.dtype}"
            )
        shape = {"w13": (2 * spec.intermediate, spec.hidden), "w2": (spec.hidden, spec.intermediate)}[name]
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name}: expected {list(shape)}, got {list(tensor.shape)}")
        if name == "w13":
            pair = (tensor[None], tensor.new_empty(1, spec.hidden, spec.intermediate, device="meta"))
        else:
            pair = (tensor.new_empty(1, 2 * spec.intermediate, spec.hidden, device="meta"), tensor[None])
        # the two matrices are quantised independently of each other; the one that did not come stays on meta
        quantised = quantize_experts(*pair, None, None, spec.weight_format)
        given[name] = getattr(quantised, name)[0]
        given[f"{name}_scale"] = getattr(quantised, f"{name}_scale")[0]

    def _mark(self) -> None:
        for param in self.parameters():
            param.megamoe_expert_parallel = True  # type: ignore[attr-defined]

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.layout is not None:
            canonical = self.weights()
            for name in _MATRICES:
                destination[prefix + name] = getattr(canonical, name)
                if f"{prefix}{name}_scale" in destination:
                    destination[f"{prefix}{name}_scale"] = getattr(canonical, f"{name}_scale")

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        layout, spec = self.layout, self.spec
        packed: dict[str, tuple[Tensor, Tensor | None]] = {}
        if layout is not None:
            # what is loaded is canonical: it goes into a canonical copy, and from there into the packed memory
            for name in _MATRICES:
                if not {prefix + name, f"{prefix}{name}_scale"}.isdisjoint(state_dict):
                    codes, scale = getattr(self, name).data, getattr(self, f"{name}_scale")
                    packed[name] = codes, None if scale is None else scale.data
                    self._put(name, *layout.unpack(name, *packed[name], spec))
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        for name, (old, old_scale) in packed.items():
            assert layout is not None
            new, new_scale = layout.pack(name, getattr(self, name).detach(), getattr(self, f"{name}_scale"), spec)
            if new.dtype == old.dtype:  # not so where `assign=True` brought another one
                old.copy_(new)
                if old_scale is not None and new_scale is not None:
                    old_scale.copy_(new_scale)
                new, new_scale = old, old_scale
            self._put(name, new, new_scale)
        # `assign=True` puts other parameters in place of the marked ones
        self._mark()

    def __setstate__(self, state: Any) -> None:
        # a deep copy of a parameter does not carry the mark
        super().__setstate__(state)
        self._mark()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        # `.to(bfloat16)` and the like would turn E4M3 codes and FP32 scales into other numbers: keep their dtypes
        def keep_codes(tensor: Tensor) -> Tensor:
            result = fn(tensor)
            return result if result.dtype == tensor.dtype else tensor.to(result.device)

        convert = fn if self.spec.weight_format == "none" else keep_codes
        if self.layout is not None:
            # the packed form belongs to this device and this dtype
            probe = convert(torch.empty(0, dtype=self.w13.dtype, device=self.w13.device))
            if (probe.device, probe.dtype) != (self.w13.device, self.w13.dtype):
                self.unpack_()
        result = super()._apply(convert, recurse)
        self._mark()
        return result

    def train(self, mode: bool = True) -> Experts:
        """As every module's; a layer that can be trained gets its canonical matrices back."""
        if mode and self.spec.weight_format == "none":
            self.unpack_()
        return super().train(mode)

    def extra_repr(self) -> str:
        last = self.first_expert + self.num_local_experts - 1
        parts = [
            f"experts {self.first_expert}..{last} of {self.spec.num_experts}",
            f"hidden={self.spec.hidden}",
            f"intermediate={self.spec.intermediate}",
            f"format={self.spec.weight_format}",
            f"dtype={str(self.dtype).removeprefix('torch.')}",
        ]
        parts += ["bias"] if self.spec.expert_bias else []
        return ", ".join(parts + ([] if self.layout is None else [f"packed as {self.layout.layout_id}"]))


def _shifted(show: Callable[[int], None], before: int) -> Callable[[int, int], None]:
    return lambda done, _: show(before + done)


def _parameters(
    spec: MoESpec, num_local_experts: int, dtype: torch.dtype
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return name -> (shape, dtype) of the parameters."""
    two_i = 2 * spec.intermediate
    # quantising on the meta device costs nothing and asks the one place that knows the layouts
    w13 = torch.empty(num_local_experts, two_i, spec.hidden, dtype=dtype, device="meta")
    w2 = torch.empty(num_local_experts, spec.hidden, spec.intermediate, dtype=dtype, device="meta")
    b13 = torch.empty(num_local_experts, two_i, dtype=dtype, device="meta") if spec.expert_bias else None
    b2 = torch.empty(num_local_experts, spec.hidden, dtype=dtype, device="meta") if spec.expert_bias else None
    weights = quantize_experts(w13, w2, b13, b2, spec.weight_format)
    tensors = {name: getattr(weights, name) for name in _NAMES}
    return {name: (tuple(t.shape), t.dtype) for name, t in tensors.items() if t is not None}
