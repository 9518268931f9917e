"""The comparison that benchmarks/indexer_attention.py makes can pass, and can fail. The figures need a GPU."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers_attention import HIDDEN, config_of, layer_of

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    yield
    for name in ("indexer_attention", "gpu_timing", "result_file"):
        sys.modules.pop(name, None)


@torch.no_grad()
def test_a_sample_of_a_prefill_is_decoded_once_more() -> None:
    import indexer_attention as bench

    config = config_of("deepseek_v32", attention={"page_size": 16}, indexer={"head_dim": 32, "heads": 8,
                       "quantization": "fp8", "hadamard": True})  # fmt: skip
    layer = layer_of(config)
    x = torch.randn(2, 70, HIDDEN)
    cache = layer.make_cache(2)
    out, kept = layer(x, cache=cache, return_indices=True)
    samples = [(b, s, x[b, s], out[b, s], kept[b, s]) for b, s in ((0, 3), (1, 40), (0, 69))]
    found = bench.compare_mla(layer, cache, samples)
    assert found["row_error"] < 1e-11 and found["cache_row_error"] < 1e-11 and found["shared_keys"] == 1
    assert bench.judge("small", found) == found

    wrong = [(b, s, row, y * torch.tensor([1.8] + [1.0] * (HIDDEN - 1)), k) for b, s, row, y, k in samples]
    with pytest.raises(SystemExit, match="a row is off"):
        bench.judge("small", bench.compare_mla(layer, cache, wrong))
    other = samples[2][4].clone()
    other[0] = next(t for t in range(69) if t not in other.tolist())
    y, _ = layer(x[:1], topk_indices=torch.cat([kept[0, :69], other[None]])[None], return_indices=True)
    with pytest.raises(SystemExit, match="of the kept keys"):
        bench.judge("small", bench.compare_mla(layer, cache, [(*samples[2][:3], y[0, 69], other)]))


@torch.no_grad()
def test_events_leave_nothing_behind() -> None:
    import indexer_attention as bench

    layer = layer_of(config_of("gqa"))
    before = dict(vars(layer))

    class Event:
        def __init__(self, **_: object) -> None: ...

        def record(self) -> None: ...

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "Event", Event)
        with bench.events_around(
            {"choice": (layer, "_choose"), "sparse": (bench.indexer_module, "sparse_attention")}
        ) as found:
            layer(torch.randn(1, 9, HIDDEN))
    assert {name: len(pairs) for name, pairs in found.items()} == {"choice": 1, "sparse": 1}
    assert vars(layer).keys() == before.keys()
    from megamoe.kernels.sparse_attention import sparse_attention

    assert bench.indexer_module.sparse_attention is sparse_attention
