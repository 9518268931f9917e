"""The plot's bars are the loads that the table shows."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from megamoe.launch.plot import expert_load_figure, save_expert_load
from megamoe.launch.report import load_bars

pytest.importorskip("matplotlib", reason="pip install 'megamoe[plot]'")


@pytest.mark.parametrize(("num_experts", "per_rank"), [(1, 1), (8, 2), (32, 8), (384, 48)])
def test_one_bar_per_expert_as_high_as_its_load(num_experts: int, per_rank: int) -> None:
    load = [random.Random(expert).randrange(1000) for expert in range(num_experts)]
    axes = expert_load_figure(load, per_rank, "a title").axes[0]
    bars = sorted(axes.patches, key=lambda bar: bar.get_x())
    assert [bar.get_height() for bar in bars] == load
    assert [round(bar.get_x() + bar.get_width() / 2) for bar in bars] == list(range(num_experts))
    colors = [bar.get_facecolor() for bar in bars]
    for first in range(0, num_experts, per_rank):  # one colour within a rank, another for its neighbour
        assert len(set(colors[first : first + per_rank])) == 1
        if first:
            assert colors[first] != colors[first - 1]


def test_the_file_is_a_png_image(tmp_path: Path) -> None:
    from matplotlib.image import imread

    path = tmp_path / "load.png"
    save_expert_load(path, [3, 0, 5, 1], 2, "load")
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    image = imread(path)
    assert image.ndim == 3 and image.shape[0] > 100 and image.std() > 0


def test_all_idle_experts_draw() -> None:
    assert [bar.get_height() for bar in expert_load_figure([0, 0], 1, "idle").axes[0].patches] == [0, 0]


def test_table_bars_hold_every_load_and_the_sum() -> None:
    load = [0, 10, 5, 1]
    lines = load_bars(load, 2)
    assert [int(line.split()[4]) for line in lines[:-1]] == load
    assert [line.count("#") for line in lines[:-1]] == [0, 24, 12, 2]
    assert lines[-1].startswith("16 assignments to 4 experts") and "1 idle" in lines[-1]


def test_table_of_many_experts_shows_the_most_loaded() -> None:
    load = list(range(100))
    lines = load_bars(load, 10)
    assert [int(line.split()[1]) for line in lines[:-1]] == list(range(68, 100))
    assert "32 most loaded" in lines[-1]
