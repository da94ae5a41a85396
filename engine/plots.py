"""Line charts as SVG, for reports that a browser shows: panels side by side, a legend under each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree as ET

from engine.errors import PlotError

_WIDTH, _HEIGHT = 460, 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 36, 48
_LEGEND_LINE = 16
_TICKS = 5
# Okabe and Ito's colours, told apart by the colour-blind as well.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
_DASHED = "5 4"


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a chart: points (x, y) in the order they are joined; ``dashed`` for what is only a reference."""

    name: str
    points: Sequence[tuple[float, float]]
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class Panel:
    """One chart; its axes begin at zero and end at a round number above the largest value."""

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]


def check_plot_path(path: Path) -> None:
    """Refuse, before anything slow, a file that ``write_plot`` could not write.

    Raises:
        PlotError: the name does not end in .svg, is a folder's, or its folder does not exist.
    """
    if path.suffix.lower() != ".svg":
        raise PlotError(f"{path}: plots are written as SVG; give a name that ends in .svg")
    if path.is_dir():
        raise PlotError(f"{path}: is a folder; give the name of a file")
    if not path.absolute().parent.is_dir():
        raise PlotError(f"{path}: its folder does not exist; create it first")


def write_plot(path: Path, panels: Sequence[Panel]) -> None:
    """Write panels side by side.

    Raises:
        PlotError: the file cannot be written.
    """
    check_plot_path(path)
    try:
        path.write_text(draw(panels), encoding="utf-8")
    except OSError as error:
        raise PlotError(f"{path}: cannot be written ({error.strerror or error})") from error


def draw(panels: Sequence[Panel]) -> str:
    """The SVG document of panels side by side."""
    legend = _LEGEND_LINE * max(len(panel.series) for panel in panels)
    width, height = _WIDTH * len(panels), _HEIGHT + legend
    root = ET.Element(
        "svg",
        {
            "xmlns": "http://www.w3.org/2000/svg",
            "viewBox": f"0 0 {width} {height}",
            "width": str(width),
            "height": str(height),
            "font-family": "sans-serif",
            "font-size": "12",
        },
    )
    ET.SubElement(root, "rect", {"width": "100%", "height": "100%", "fill": "white"})
    for place, panel in enumerate(panels):
        group = ET.SubElement(root, "g", {"transform": f"translate({place * _WIDTH} 0)"})
        _Canvas(group, panel).draw()
    ET.indent(root)
    return ET.tostring(root, encoding="unicode") + "\n"


class _Canvas:
    """One panel being drawn; maps its values to the plane of the document."""

    def __init__(self, group: ET.Element, panel: Panel) -> None:
        self._group = group
        self._panel = panel
        points = [point for series in panel.series for point in series.points]
        self._x_step, self._x_end = _scale([x for x, _ in points])
        self._y_step, self._y_end = _scale([y for _, y in points])

    def draw(self) -> None:
        bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
        self._text(_WIDTH / 2, _TOP - 16, self._panel.title, {"font-weight": "bold"})
        self._text(_WIDTH / 2, _HEIGHT - 10, self._panel.x_label)
        self._text(16, _HEIGHT / 2, self._panel.y_label, {"transform": f"rotate(-90 16 {_HEIGHT / 2:g})"})
        for value in _ticks(self._x_step, self._x_end):
            self._text(self._x(value), bottom + 16, f"{value:g}")
        for value in _ticks(self._y_step, self._y_end):
            y = self._y(value)
            self._line([(_LEFT, y), (right, y)], "#dddddd", 1.0)
            self._text(_LEFT - 6, y + 4, f"{value:g}", {"text-anchor": "end"})
        self._line([(_LEFT, _TOP), (_LEFT, bottom), (right, bottom)], "#000000", 1.0)
        for place, series in enumerate(self._panel.series):
            self._series(series, _COLOURS[place % len(_COLOURS)], _HEIGHT + place * _LEGEND_LINE)

    def _series(self, series: Series, colour: str, legend: float) -> None:
        points = [(self._x(x), self._y(y)) for x, y in series.points]
        for line in (points, [(_LEFT, legend), (_LEFT + 24, legend)]):
            self._line(line, colour, 2.0, series.dashed)
        if not series.dashed:
            for x, y in points:
                ET.SubElement(self._group, "circle", {"cx": f"{x:.1f}", "cy": f"{y:.1f}", "r": "3", "fill": colour})
        self._text(_LEFT + 30, legend + 4, series.name, {"text-anchor": "start"})

    def _x(self, value: float) -> float:
        return _LEFT + value / self._x_end * (_WIDTH - _LEFT - _RIGHT)

    def _y(self, value: float) -> float:
        return _HEIGHT - _BOTTOM - value / self._y_end * (_HEIGHT - _TOP - _BOTTOM)

    def _line(self, points: Sequence[tuple[float, float]], colour: str, width: float, dashed: bool = False) -> None:
        attributes = {
            "points": " ".join(f"{x:.1f},{y:.1f}" for x, y in points),
            "fill": "none",
            "stroke": colour,
            "stroke-width": f"{width:g}",
        }
        ET.SubElement(self._group, "polyline", attributes | ({"stroke-dasharray": _DASHED} if dashed else {}))

    def _text(self, x: float, y: float, text: str, attributes: dict[str, str] | None = None) -> None:
        place = {"x": f"{x:.1f}", "y": f"{y:.1f}", "text-anchor": "middle"}
        ET.SubElement(self._group, "text", place | (attributes or {})).text = text


def _scale(values: Sequence[float]) -> tuple[float, float]:
    """A round step between ticks, and the multiple of it that no value exceeds."""
    largest = max(values, default=0.0)
    if not largest > 0:
        return 1.0, 1.0
    rough = largest / _TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * (1 - 1e-9))
    return step, step * math.ceil(largest / step - 1e-9)


def _ticks(step: float, end: float) -> list[float]:
    return [step * i for i in range(round(end / step) + 1)]
