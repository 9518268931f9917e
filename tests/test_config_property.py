"""Any input to the configuration gives a configuration or one sentence, and never a traceback."""

from __future__ import annotations

import dataclasses
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

from helpers_config import data, sentence
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megamoe.config import MoEConfig
from megamoe.config_report import resolved_report
from megamoe.config_sections import SECTIONS
from megamoe.errors import ConfigError

_KEYS = [(section, field.name) for section, declared in SECTIONS.items() for field in dataclasses.fields(declared)]
_property = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def _loads_or_says_why(call: Callable[[], Any]) -> str | None:
    """Return None when `call` works, its message when it raises ConfigError; anything else fails the test."""
    try:
        config = call()
    except ConfigError as error:
        assert len(str(error).splitlines()) == 1 and len(str(error)) < 2000, error
        return str(error)
    assert MoEConfig.from_dict(config.to_dict()) == config
    assert resolved_report(config)
    return None


@_property
@given(st.sampled_from(_KEYS), st.data())
def test_every_misspelt_key_is_refused_with_a_valid_one(key: tuple[str, str], draw: st.DataObject) -> None:
    section, name = key
    place = draw.draw(st.integers(0, len(name) - 1))
    letter = draw.draw(st.sampled_from(string.ascii_lowercase + "_"))
    typo = draw.draw(
        st.sampled_from(
            [
                name[:place] + name[place + 1 :],
                name[:place] + letter + name[place:],
                name[:place] + letter + name[place + 1 :],
                name.upper(),
                name[::-1],
            ]
        )
    )
    valid = {field.name for field in dataclasses.fields(SECTIONS[section])}
    if typo in valid:
        return
    for call in (
        lambda: MoEConfig.from_dict(data(**{section: {typo: 1}}), source="f.yaml"),
        lambda: MoEConfig.from_dict(data(), source="f.yaml", overrides=[f"{section}.{typo}=1"]),
    ):
        message = sentence(call)
        if section == "indexer" and "is missing" in message:
            continue
        assert "f.yaml" in message and (not typo or typo in message)
        hinted = message.partition("did you mean '")[2].partition("'")[0] or message.partition("valid keys are ")[2]
        if typo:
            named = {word.strip().rpartition(".")[2] for word in hinted.split(",")}
            assert named <= {known for _, known in _KEYS}, message


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from([1, 2, 4, 64, 1.5]),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=4), children, max_size=3),
    max_leaves=5,
)


@_property
@given(st.sampled_from(_KEYS), _VALUES)
def test_any_value_is_taken_or_refused_by_key(key: tuple[str, str], value: Any) -> None:
    section, name = key
    message = _loads_or_says_why(lambda: MoEConfig.from_dict(data(**{section: {name: value}}), source="f.yaml"))
    assert message is None or section in message or name in message, message


@_property
@given(st.dictionaries(st.text(max_size=6) | st.sampled_from(sorted(SECTIONS)), _VALUES, max_size=4))
def test_any_mapping_is_taken_or_refused(content: dict[str, Any]) -> None:
    _loads_or_says_why(lambda: MoEConfig.from_dict(content))


@_property
@given(
    st.text(max_size=30) | st.sampled_from(_KEYS).flatmap(lambda k: st.text(max_size=12).map(f"{k[0]}.{k[1]}=".__add__))
)
def test_any_override_is_taken_or_refused(override: str) -> None:
    _loads_or_says_why(lambda: MoEConfig.from_dict(data(), overrides=[override]))


@_property
@given(st.text(max_size=60) | st.text(alphabet="{}[]:,-&*!|>'\"%@#? \n\tabx01~.", max_size=40))
def test_any_text_is_taken_or_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "any.yaml"
    path.write_text(text, encoding="utf-8", newline="")
    message = _loads_or_says_why(lambda: MoEConfig.from_yaml(path))
    assert message is not None and message.startswith(str(path))
