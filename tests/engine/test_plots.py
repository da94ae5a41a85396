from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from engine.errors import PlotError
from engine.plots import Panel, Series, check_plot_path, draw, write_plot

SVG = "{http://www.w3.org/2000/svg}"
PANEL = Panel(
    "Speed & size",
    "budget [%]",
    "tokens/s",
    [Series("measured", [(0, 0), (50, 30), (100, 40)]), Series("bound <best>", [(0, 40), (100, 40)], dashed=True)],
)


def test_points_lie_where_their_values_say(tmp_path: Path) -> None:
    write_plot(tmp_path / "p.svg", [PANEL, PANEL])
    root = ET.parse(tmp_path / "p.svg").getroot()
    first, second = root.findall(f"{SVG}g")
    assert second.get("transform") == "translate(460 0)"
    centres = [(float(c.get("cx", "")), float(c.get("cy", ""))) for c in first.findall(f"{SVG}circle")]
    (left, low), (middle, _), (right, high) = centres
    # Both axes begin at zero; x ends at 100 and y at 40, the largest values there are.
    assert middle - left == right - middle
    assert (low - centres[1][1]) / (low - high) == pytest.approx(30 / 40, abs=0.01)
    texts = [t.text for t in first.findall(f"{SVG}text")]
    assert {"Speed & size", "tokens/s", "measured", "bound <best>", "100", "40"} <= set(texts)


def test_a_reference_is_dashed_and_has_no_marks() -> None:
    group = ET.fromstring(draw([PANEL])).find(f"{SVG}g")
    assert group is not None
    assert len(group.findall(f"{SVG}circle")) == 3
    # The line and its place in the legend.
    assert sum("stroke-dasharray" in line.attrib for line in group.findall(f"{SVG}polyline")) == 2


def test_values_that_are_all_zero_can_be_drawn() -> None:
    assert "<circle" in draw([Panel("", "x", "y", [Series("flat", [(0, 0), (1, 0)])])])


@pytest.mark.parametrize(
    ("name", "reason"), [("p.bmp", "ends in .svg"), ("missing/p.svg", "folder does not exist"), ("p", "ends in .svg")]
)
def test_a_bad_target_is_refused_beforehand(tmp_path: Path, name: str, reason: str) -> None:
    with pytest.raises(PlotError, match=reason):
        check_plot_path(tmp_path / name)


def test_a_target_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "p.svg").mkdir()
    with pytest.raises(PlotError, match=r"p\.svg: is a folder"):
        write_plot(tmp_path / "p.svg", [PANEL])
