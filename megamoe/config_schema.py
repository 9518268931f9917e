"""The strict half of the configuration: reading YAML, finding presets, and checking fields against their declarations.

`megamoe.config` declares the fields; this module turns text into plain dictionaries and says in one sentence what is
wrong with them. Nothing here knows what a field means.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from megamoe.errors import ConfigError

__all__ = [
    "apply_overrides",
    "check_fields",
    "check_sections",
    "choice",
    "flag",
    "nearest",
    "number",
    "one_line",
    "parse_yaml",
    "preset_names",
    "read_source",
    "show",
    "size",
]

# Larger than any model dimension in use; a value beyond it is a slip of the finger, not a size.
MAX_SIZE = 1 << 20

# Names used by the config.json of published models, for people who copy a value from there.
_KNOWN_AS = {
    "hidden_size": "hidden",
    "moe_intermediate_size": "intermediate",
    "intermediate_size": "intermediate",
    "n_routed_experts": "num_experts",
    "num_local_experts": "num_experts",
    "num_experts_per_tok": "top_k",
    "n_shared_experts": "shared_experts",
    "hidden_act": "activation",
    "scoring_func": "score",
    "norm_topk_prob": "renormalize",
    "routed_scaling_factor": "scale",
    "n_group": "groups",
    "topk_group": "topk_groups",
    "index_topk": "top_k",
    "index_n_heads": "heads",
    "index_head_dim": "head_dim",
    "ep_size": "expert_parallel_size",
    "num_key_value_heads": "kv_heads",
    "q_lora_rank": "q_lora",
    "kv_lora_rank": "kv_lora",
    "qk_nope_head_dim": "nope_dim",
    "qk_rope_head_dim": "rope_dim",
    "v_head_dim": "value_dim",
    "sliding_window": "window",
    "o_groups": "output_groups",
    "o_lora_rank": "output_lora",
    "rms_norm_eps": "norm_eps",
}

_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = _repr.maxlong = 60


def one_line(text: str) -> str:
    """Return `text` with every run of white space as one space, so that a message stays one line."""
    return " ".join(text.split())


def show(value: Any) -> str:
    """Return a short, one-line form of a value, as YAML writes it where that is possible."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int) and value.bit_length() > 200:
        return f"an integer of {value.bit_length()} bits"
    return one_line(_repr.repr(value))


def nearest(name: str, valid: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the valid name that `name` was most likely meant to be, or None when none is near."""
    near = difflib.get_close_matches(name.lower(), list(valid), n=1, cutoff=cutoff)
    return near[0] if near else None


# --- declarations: what a dataclass field says about the values that it takes ---


def size(default: Any = dataclasses.MISSING, *, low: int = 1, high: int = MAX_SIZE) -> Any:
    """Declare an integer field with its bounds (both included)."""
    return dataclasses.field(default=default, metadata={"low": low, "high": high})


def number(
    default: Any = dataclasses.MISSING,
    *,
    low: float | None = None,
    above: float | None = None,
    high: float | None = None,
) -> Any:
    """Declare a finite float field with bounds that are included (`low`, `high`) or excluded (`above`)."""
    return dataclasses.field(default=default, metadata={"low": low, "above": above, "high": high})


def choice(*choices: str, default: Any = dataclasses.MISSING) -> Any:
    """Declare a string field with its valid values."""
    return dataclasses.field(default=default, metadata={"choices": choices})


def flag(default: Any = dataclasses.MISSING) -> Any:
    """Declare a bool field."""
    return dataclasses.field(default=default)


_KINDS: dict[str, tuple[type, str]] = {
    "int": (int, "an integer"),
    "float": (float, "a number"),
    "bool": (bool, "true or false"),
    "str": (str, "a word"),
}


_YAML_1_1_BOOLS = {"yes": True, "on": True, "no": False, "off": False}


def _is_kind(value: Any, kind: str) -> bool:
    """Return True for a value of exactly this type: true is not an integer here, although Python thinks so."""
    return type(value) is _KINDS[kind][0]


def _type_hint(value: Any, kind: str) -> str:
    """Return how a value of the wrong type should have been written, or nothing."""
    if kind == "bool" and isinstance(value, str) and value.lower() in _YAML_1_1_BOOLS:
        return f"; write {show(_YAML_1_1_BOOLS[value.lower()])}"
    if isinstance(value, str):
        try:
            parsed = parse_yaml(value)
        except ConfigError:
            return ""
        if _is_kind(parsed, kind) or (kind == "float" and _is_kind(parsed, "int")):
            return f"; write {show(parsed)} without quotes"
    if kind == "int" and isinstance(value, float) and math.isfinite(value) and value == int(value):
        return f"; write {show(int(value))}"
    if kind == "bool" and type(value) is int and value in (0, 1):
        return f"; write {show(bool(value))}"
    return ""


def check_fields(instance: Any, prefix: str) -> None:
    """Check every declared field of a frozen dataclass instance, and turn integers into floats where floats are meant.

    Args:
        instance: a dataclass instance whose annotations are int, float, bool, str or one of them with `| None`.
        prefix: what stands before the field's name in a message, e.g. "model".

    Raises:
        ConfigError: a wrong type, a value out of its bounds, or a word that is not among the choices.
    """
    for field in dataclasses.fields(instance):
        kind, _, optional = str(field.type).partition(" | ")
        value = getattr(instance, field.name)
        key, meta = f"{prefix}.{field.name}", field.metadata
        if value is None and optional:
            continue
        if kind == "float" and type(value) is int:
            try:
                value = float(value)
            except OverflowError:
                raise ConfigError(f"{key} must be a finite number, got {show(value)}") from None
            object.__setattr__(instance, field.name, value)
        choices = meta.get("choices")
        if not _is_kind(value, kind):
            what = f"one of {', '.join(choices)}" if choices else _KINDS[kind][1]
            null = " or null" if optional else ""
            raise ConfigError(f"{key} must be {what}{null}, got {show(value)}{_type_hint(value, kind)}")
        if choices:
            if value not in choices:
                near = nearest(value, choices, cutoff=0.4)
                hint = f"; did you mean '{near}'?" if near else ""
                raise ConfigError(f"{key} must be one of {', '.join(choices)}, got {show(value)}{hint}")
            continue
        if kind == "float" and not math.isfinite(value):
            raise ConfigError(f"{key} must be a finite number, got {show(value)}")
        low, high, above = meta.get("low"), meta.get("high"), meta.get("above")
        if low is not None and value < low:
            raise ConfigError(f"{key} must be at least {show(low)}, got {show(value)}")
        if high is not None and value > high:
            raise ConfigError(f"{key} must be at most {show(high)}, got {show(value)}")
        if above is not None and value <= above:
            raise ConfigError(f"{key} must be greater than {show(above)}, got {show(value)}")


# --- plain dictionaries: sections, keys, overrides ---


def _field_names(section: type) -> list[str]:
    return [field.name for field in dataclasses.fields(section)]


def _key_hint(section: str, key: str, sections: Mapping[str, type], *, qualified: bool = False) -> str:
    """Return the nearest valid choice for an unknown key of a section, as `section.key` where `qualified`."""
    own = {name: f"{section}.{name}" if qualified else name for name in _field_names(sections[section])}
    wanted = _KNOWN_AS.get(key, key)
    if wanted in own:
        return f"did you mean '{own[wanted]}'?"
    for other, declared in sections.items():
        if wanted in _field_names(declared):
            return f"did you mean '{other}.{wanted}'?"
    near = nearest(key, own)
    return f"did you mean '{own[near]}'?" if near else f"valid keys are {', '.join(own)}"


def _section_hint(name: str, sections: Mapping[str, type]) -> str:
    """Return the nearest valid choice for an unknown section, which may be a key that stands one level too high."""
    wanted = _KNOWN_AS.get(name, name)
    for section, declared in sections.items():
        if wanted in _field_names(declared):
            return f"did you mean '{section}.{wanted}'?"
    near = nearest(name, sections)
    return f"did you mean '{near}'?" if near else f"valid sections are {', '.join(sections)}"


def check_sections(
    data: Any, sections: Mapping[str, type], optional: Sequence[str]
) -> dict[str, dict[str, Any] | None]:
    """Check names and nesting of a configuration, not its values.

    Args:
        data: what the YAML file held.
        sections: section name -> dataclass whose fields are the valid keys.
        optional: sections that may be absent or null.

    Returns:
        A copy: section name -> {key: value}, or None for an absent optional section.

    Raises:
        ConfigError: not a mapping, an unknown or missing section, an unknown or missing key.
    """
    if not isinstance(data, Mapping):
        got = "nothing" if data is None else show(data)
        raise ConfigError(f"a configuration must be a mapping of the sections {', '.join(sections)}, got {got}")
    for name in data:
        if name not in sections:
            raise ConfigError(f"unknown section {show(name)}; {_section_hint(str(name), sections)}")
    result: dict[str, dict[str, Any] | None] = {}
    for name, declared in sections.items():
        content = data.get(name)
        if content is None and name in optional:
            result[name] = None
            continue
        fields = dataclasses.fields(declared)
        required = [f.name for f in fields if f.default is dataclasses.MISSING]
        if name not in data:
            if required:
                raise ConfigError(f"section '{name}' is missing; it needs at least {', '.join(required)}")
            content = {}
        if not isinstance(content, Mapping):
            raise ConfigError(f"section '{name}' must be a mapping of key: value, got {show(content)}")
        for key in content:
            if key not in _field_names(declared):
                raise ConfigError(f"unknown key {show(key)} in section '{name}'; {_key_hint(name, str(key), sections)}")
        for key in required:
            if key not in content:
                raise ConfigError(f"{name}.{key} is missing; section '{name}' needs {', '.join(required)}")
        result[name] = dict(content)
    return result


def apply_overrides(data: Any, overrides: Sequence[str], sections: Mapping[str, type]) -> Any:
    """Return a copy of `data` with `section.key=value` assignments applied, the last one winning.

    Raises:
        ConfigError: an override that is not of this form, or names an unknown section or key.
    """
    result = data
    if isinstance(data, Mapping):
        result = {name: dict(keys) if isinstance(keys, Mapping) else keys for name, keys in data.items()}
    for override in overrides:
        key, equals, text = override.partition("=")
        section, dot, name = key.partition(".")
        shown = f"override {show(override)}"
        if not equals or not dot or not section or not name:
            raise ConfigError(f"{shown} must look like section.key=value, for example model.num_experts=16")
        if section not in sections:
            raise ConfigError(f"{shown} names the unknown section {show(section)}; {_section_hint(section, sections)}")
        if name not in _field_names(sections[section]):
            hint = _key_hint(section, name, sections, qualified=True)
            raise ConfigError(f"{shown} names the unknown key {show(key)}; {hint}")
        try:
            value = parse_yaml(text)
        except ConfigError as error:
            raise ConfigError(f"{shown} has a value that is {error}") from None
        if not isinstance(result, dict):
            continue  # the file itself is wrong, and the caller says so
        if result.get(section) is None:
            result[section] = {}
        if isinstance(result[section], dict):
            result[section][name] = value
    return result


# --- YAML ---


class _StrictLoader(yaml.SafeLoader):
    """YAML as data only: the core schema of YAML 1.2 (no "yes", no octal, no dates; 3e-3 is a number), unique keys."""

    yaml_implicit_resolvers: dict[str, Any] = {}

    def compose_node(self, parent: Any, index: Any) -> Any:
        event: Any = self.peek_event()
        if getattr(event, "tag", None) is not None:
            problem = f"the tag '{event.tag.replace('tag:yaml.org,2002:', '!!')}' is not allowed; write the plain value"
            raise yaml.constructor.ConstructorError(None, None, problem, event.start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag != "tag:yaml.org,2002:str":
                # also 4, true and null, which are not names of anything here
                raise yaml.constructor.ConstructorError(None, None, "a key must be a plain word", key_node.start_mark)
            if key_node.value in seen:
                problem = f"the key {show(key_node.value)} stands twice in one mapping; keep one of the two"
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            seen.add(key_node.value)
        return super().construct_mapping(node, deep)


for _tag, _pattern, _first in (
    ("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", "tTfF"),
    ("int", r"^[-+]?(?:0|[1-9][0-9]*)$", "-+0123456789"),
    ("float", r"^[-+]?(?:(?:\.[0-9]+|[0-9]+\.[0-9]*)(?:[eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+)$", "-+.0123456789"),
    ("float", r"^[-+]?\.(?:inf|Inf|INF)$", "-+."),
    ("float", r"^\.(?:nan|NaN|NAN)$", "."),
    ("null", r"^(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
):
    _StrictLoader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(_pattern), list(_first))


def parse_yaml(text: str) -> Any:
    """Return the data of one YAML document.

    Raises:
        ConfigError: not valid YAML; the message begins with "not valid YAML" and names the line.
    """
    try:
        return yaml.load(text, Loader=_StrictLoader)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError(f"not valid YAML at line {line}: {show(chr(error.character))} is not allowed") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        problem = error.problem or error.context or "it cannot be read"
        raise ConfigError(one_line(f"not valid YAML at line {line}: {problem}")) from None
    except RecursionError:
        raise ConfigError("not valid YAML: it is nested too deeply") from None
    except ValueError as error:  # an integer of thousands of digits
        raise ConfigError(one_line(f"not valid YAML: {error}")) from None


# --- files and presets ---


def preset_names() -> list[str]:
    """Return the names of the shipped presets, sorted."""
    files = resources.files("megamoe.configs").iterdir()
    return sorted(f.name.removesuffix(".yaml") for f in files if f.name.endswith(".yaml"))


def _preset_of(path: Path) -> str | None:
    """Return the preset that `path` means: `name`, `name.yaml` or `configs/name.yaml`."""
    if path.parent not in (Path("."), Path("configs")) or (path.parent == Path("configs") and path.suffix != ".yaml"):
        return None
    name = path.name.removesuffix(".yaml")
    return name if name in preset_names() else None


def read_source(path_or_preset: str | Path) -> tuple[str, str]:
    """Return (source, text) of a configuration file, or of a shipped preset where no such file exists.

    Raises:
        ConfigError: no such file or preset (the message names the presets), or a file that cannot be read.
    """
    path = Path(path_or_preset)
    shown = one_line(str(path_or_preset))
    try:
        if path.is_file():
            return shown, path.read_text(encoding="utf-8-sig")
        name = _preset_of(path)
        if name is not None:
            return f"preset {name}", (resources.files("megamoe.configs") / f"{name}.yaml").read_text(encoding="utf-8")
        if path.exists():
            raise ConfigError(f"{shown}: a configuration must be a YAML file, and this is not a regular file")
    except UnicodeDecodeError:
        raise ConfigError(f"{shown}: a configuration must be UTF-8 text, and this file is not") from None
    except OSError as error:
        raise ConfigError(f"{shown[:200]}: cannot be read: {error.strerror or error}") from None
    names = preset_names()
    near = nearest(path.name.removesuffix(".yaml"), names, cutoff=0.5)
    hint = f"did you mean '{near}', one of the presets" if near else "the presets are"
    raise ConfigError(f"{shown}: no such file or preset; {hint} {', '.join(names)}{'?' if near else ''}")
