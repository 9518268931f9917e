"""What the tests of the configuration share: a valid configuration, and the demand for one sentence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from megamoe.errors import ConfigError

BASE = """\
model: {hidden: 256, intermediate: 512, num_experts: 32, top_k: 4, shared_experts: 1}
router: {score: softmax}
parallel: {expert_parallel_size: 4}
"""


def sentence(call: Callable[[], Any]) -> str:
    """Return the message of the ConfigError that `call` must raise; it must be one line and hold no traceback."""
    with pytest.raises(ConfigError) as caught:
        call()
    message = str(caught.value)
    assert message and len(message.splitlines()) == 1, message
    assert "Traceback" not in message and message == message.strip()
    return message


def data(**sections: dict[str, Any] | None) -> dict[str, Any]:
    """Return a valid configuration as dictionaries, with the keys of some sections changed."""
    base: dict[str, Any] = {
        "model": {"hidden": 256, "intermediate": 512, "num_experts": 32, "top_k": 4},
        "router": {"score": "softmax"},
        "parallel": {"expert_parallel_size": 4},
    }
    for name, keys in sections.items():
        base[name] = keys if keys is None else {**base.get(name, {}), **keys}
    return base
