"""Sizes of attention layers that are counted from the configuration are those of the layers themselves."""

from __future__ import annotations

import pytest
from helpers_attention import KINDS, config_of

from megamoe.attention_sizes import attention_sizes
from megamoe.config import MoEConfig
from megamoe.config_report import resolved_report
from megamoe.layers.attention import make_attention

PRESETS = ["deepseek_v32", "deepseek_v4_flash", "deepseek_v4_pro", "glm_5"]


@pytest.mark.parametrize("name", [*sorted({*KINDS} - {*PRESETS}), "deepseek_v4", *PRESETS])
def test_parameters_are_those_of_the_layer(name: str) -> None:
    config = MoEConfig.from_yaml(name) if name in PRESETS else config_of(name)
    assert config.attention is not None and config.indexer is not None
    counts = {True: 0, False: 0}
    for key, parameter in make_attention(config, device="meta").named_parameters():
        counts["indexer" in key] += parameter.numel()
    element = {"bfloat16": 2, "float32": 4}[config.model.dtype]
    found = attention_sizes(config.attention, config.indexer, config.model.hidden, element)
    assert (found.parameters, found.indexer_parameters) == (counts[False], counts[True])
    report = resolved_report(config)
    assert f"{found.parameters:,} parameters" in report and f"{found.token_bytes:,} bytes" in report


@pytest.mark.parametrize("quantization", ["none", "fp8", "mxfp4"])
@pytest.mark.parametrize("name", ["glm", "gqa"])
def test_bytes_of_a_token_are_those_of_the_cache(name: str, quantization: str) -> None:
    options = {"heads": 8, "head_dim": 32, "quantization": quantization}
    config = config_of(name, attention={"page_size": 16}, indexer=options)
    assert config.attention is not None and config.indexer is not None
    cache = make_attention(config).make_cache(2, pages=3)
    found = attention_sizes(config.attention, config.indexer, config.model.hidden, 4)
    assert cache.num_bytes == 3 * 16 * found.token_bytes


def test_a_configuration_without_attention_says_nothing_of_it() -> None:
    assert "attention layer" not in resolved_report(MoEConfig.from_yaml("quickstart"))
