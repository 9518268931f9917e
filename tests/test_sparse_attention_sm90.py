"""The SM90 kernel of sparse attention without a GPU: what it takes, and that it compiles without spills."""

from __future__ import annotations

import pytest
import torch

from megamoe.kernels import sparse_attention_sm90 as kernel
from megamoe.kernels.jit import JitSettings, build


@pytest.mark.parametrize("source", kernel.sparse_attention_sources(), ids=lambda source: source.name)
def test_compiles_without_spills(source: object) -> None:
    pytest.importorskip("cuda.core")
    artifact = build(source, JitSettings(cache_dirs=()))  # type: ignore[arg-type]
    assert artifact.usage.is_clean and artifact.usage.registers <= 168


def test_a_cpu_is_not_its_place() -> None:
    q, rows = torch.zeros(1, 64, 576, dtype=torch.bfloat16), torch.zeros(4, 1, 576, dtype=torch.bfloat16)
    assert not kernel.takes(q, rows, (0, 576), (0, 512))


def test_torch_attends_where_it_follows_or_nothing_compiles_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    q, rows = torch.zeros(1, 64, 576, dtype=torch.bfloat16), torch.zeros(4, 1, 576, dtype=torch.bfloat16)
    cut = (0, 576), (0, 512)
    monkeypatch.setattr(kernel, "runs_kernels", lambda device: True)
    assert kernel.takes(q, rows, *cut)
    with torch._subclasses.FakeTensorMode():
        assert not kernel.takes(q, rows, *cut)
    seen = []
    torch.compile(lambda x: (seen.append(kernel.takes(x, rows, *cut)), x + 1)[1], backend="eager")(q)
    assert seen == [False]
    monkeypatch.setattr(kernel, "runs_kernels", lambda device: False)
    assert not kernel.takes(q, rows, *cut)
