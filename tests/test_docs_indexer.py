"""The examples of docs/indexer.md run as they stand, and its numbers are those of the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from megamoe.attention_sizes import attention_sizes
from megamoe.config import MoEConfig
from megamoe.layers import compressed_attention, indexer_attention
from megamoe.layers.attention import make_attention

TEXT = (Path(__file__).resolve().parents[1] / "docs" / "indexer.md").read_text()
EXAMPLES = [code for code in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL) if "import torch" in code]


@pytest.mark.parametrize("code", EXAMPLES)
def test_examples(code: str) -> None:
    names: dict[str, object] = {}
    exec(code, names)
    if "step" in names:
        assert tuple(names["y"].shape) == (2, 40, 512) and tuple(names["step"].shape) == (2, 1, 512)  # type: ignore[attr-defined]
    else:
        assert tuple(names["kept"].shape) == (1, 9, 9)  # type: ignore[attr-defined]


def test_there_are_two_examples() -> None:
    assert len(EXAMPLES) == 2


@pytest.mark.parametrize("module", [indexer_attention, compressed_attention])
def test_every_name_of_a_checkpoint_is_listed(module: object) -> None:
    rows = [line for line in TEXT.splitlines() if line.startswith("| `") and " | " in line]
    words = {word.rsplit(".", 1)[-1] for row in rows for word in re.findall(r"`([^`]+)`", row)}
    for theirs, ours in module.DEEPSEEK_NAMES.items():  # type: ignore[attr-defined]
        assert theirs.rsplit(".", 1)[-1] in words and ours.rsplit(".", 1)[-1] in words, (theirs, ours)


@pytest.mark.parametrize("preset", ["deepseek_v32", "glm_5"])
def test_bytes_of_a_token(preset: str) -> None:
    config = MoEConfig.from_yaml(preset)
    assert config.attention is not None and config.indexer is not None
    found = attention_sizes(config.attention, config.indexer, config.model.hidden, 2)
    assert found.token_bytes == 1152 + 132 and "| 1152 + 132 bytes |" in TEXT


@pytest.mark.parametrize("preset", ["deepseek_v4_flash", "deepseek_v4_pro"])
def test_bytes_of_a_token_of_v4(preset: str) -> None:
    layer = make_attention(MoEConfig.from_yaml(preset), device="meta")
    assert isinstance(layer, compressed_attention.CompressedAttention)
    layer.q_a_proj = torch.nn.Linear(1, 1, dtype=torch.bfloat16)
    cache = layer.make_cache(1)
    pools = {name: pool.shape[2] * pool.element_size() for name, pool in cache.pages.pools.items()}
    beside = cache.ring * sum(pools.values()) + sum(t.numel() * t.element_size() for t in cache.recent.values())
    assert f"{sum(pools.values()) // 4} bytes (a quarter of an entry, {pools['rows']} + {pools['keys']})" in TEXT
    assert f"beside {round(beside / 1024)} KiB per sequence" in TEXT
