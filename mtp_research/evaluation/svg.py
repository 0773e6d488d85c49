"""Charts as inline SVG: points with intervals, a heat map, stacked bars.

Last stage of the flow, used by `figures.py`. Standard library only. Colours are CSS variables of
`STYLE`, so that a page follows the reader's light or dark setting; series differ by marker as well
as by colour. A chart is about 380 units wide, which is one column of a phone.
"""

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from mtp_research.evaluation.bootstrap import Estimate
from mtp_research.evaluation.tables import printable

MAX_SERIES = 8
WIDTH = 380.0
STYLE = """
svg,:root{--ink:#1b1f24;--soft:#5c6670;--rule:#d9dee3;--page:#fff;--heat:#2a78d6;
--s0:#0072b2;--s1:#c24e00;--s2:#00815f;--s3:#a8447f;--s4:#8a6a00;--s5:#5b4bc4;--s6:#7a5230;--s7:#555}
@media(prefers-color-scheme:dark){svg,:root{--ink:#e8ebee;--soft:#9aa5b0;--rule:#333b44;
--page:#14181d;--heat:#4b93e6;--s0:#56b4e9;--s1:#ff9a4d;--s2:#3cc9a0;--s3:#e58ac0;--s4:#e3c04b;
--s5:#a99cff;--s6:#cfa27a;--s7:#b5b5b5}}
.chart text{font:11px system-ui,sans-serif;fill:var(--ink)}.chart .soft{fill:var(--soft)}
.chart line{stroke:var(--rule)}.chart .line{fill:none;stroke-width:1.6}
"""
_CHARACTER = 6.2  # units of a character, about
_PLOT_HEIGHT, _LEGEND_ROW = 170.0, 16.0
_LEFT, _RIGHT, _TOP = 42.0, 10.0, 22.0


@dataclass(frozen=True)
class Series:
    """One line of a chart: a figure per position on the x axis; an undefined one is left out."""

    name: str
    points: tuple[Estimate, ...]


def interval_chart(
    series: Sequence[Series],
    *,
    x_labels: Sequence[str],
    y_label: str,
    floor: float = 0.0,
    is_connected: bool = True,
) -> str:
    """Points with whiskers from low to high, side by side at every x.

    Args:
        series: at most `MAX_SERIES` are drawn.
        x_labels: one per point of every series.
        y_label: what is measured, with its unit.
        floor: lower end of the y axis.
        is_connected: join the points of a series; False where the order of x means nothing.
    """
    shown = series[:MAX_SERIES]
    drawn = [figure for one in shown for figure in one.points if figure.value is not None]
    top = max((_high(figure) for figure in drawn), default=floor + 1.0)
    ticks = _ticks(floor, max(top, floor + 1e-6))
    slot = (WIDTH - _LEFT - _RIGHT) / max(len(x_labels), 1)
    names = [printable(name) for name in x_labels]
    is_turned = max(map(len, names), default=0) * _CHARACTER > slot - 4
    label_height = 16 + (max(map(len, names)) * _CHARACTER * 0.6 if is_turned else 0.0)
    bottom = _TOP + _PLOT_HEIGHT

    def y_of(value: float) -> float:
        return bottom - (value - ticks[0]) / (ticks[-1] - ticks[0]) * _PLOT_HEIGHT

    parts = [_text(4, 12, y_label, css="soft")]
    for tick in ticks:
        parts.append(_line(_LEFT, y_of(tick), WIDTH - _RIGHT, y_of(tick)))
        parts.append(_text(_LEFT - 5, y_of(tick) + 4, f"{tick:g}", anchor="end"))
    for index, name in enumerate(names):
        parts.append(_x_label(_LEFT + slot * (index + 0.5), bottom + 15, name, turned=is_turned))
    for number, one in enumerate(shown):
        # Neighbouring series stand apart, so that their whiskers do not cover each other.
        shift = min(9.0, slot / (len(shown) + 1)) * (number - (len(shown) - 1) / 2)
        centres = [_LEFT + slot * (i + 0.5) + shift for i in range(len(x_labels))]
        pairs = [(x, f) for x, f in zip(centres, one.points, strict=True) if f.value is not None]
        if is_connected and len(pairs) > 1:
            path = " ".join(f"{x:.1f},{y_of(_value(f)):.1f}" for x, f in pairs)
            colour = {"points": path, "class": "line", "style": f"stroke:var(--s{number})"}
            parts.append(_tag("polyline", colour))
        parts += [_whisker(x, f, number, y_of(_low(f)), y_of(_high(f))) for x, f in pairs]
        parts += [_marker(x, y_of(_value(f)), number) for x, f in pairs]
    legend_top = bottom + label_height + 14
    parts += _legend([one.name for one in shown], top=legend_top)
    height = legend_top + _LEGEND_ROW * -(-len(shown) // 2) - 6
    return _chart(parts, width=WIDTH, height=height, label=y_label)


def heat_map(
    values: Sequence[Sequence[float | None]], *, rows: Sequence[str], columns: Sequence[str]
) -> str:
    """A matrix of figures; the darker a cell, the larger its value. An empty cell shows a dash."""
    row_names, column_names = [printable(n) for n in rows], [printable(n) for n in columns]
    cell, cell_height = 54.0, 30.0
    left = max(map(len, row_names), default=0) * _CHARACTER + 12
    longest = max(map(len, column_names), default=0)
    is_turned = longest * _CHARACTER > cell - 4
    head = 20 + (longest * _CHARACTER * 0.6 if is_turned else 0.0)
    known = [value for row in values for value in row if value is not None]
    low, high = min(known, default=0.0), max(known, default=1.0)
    parts = [
        _x_label(left + cell * (i + 0.5), head - 7, name, turned=is_turned, rising=True)
        for i, name in enumerate(column_names)
    ]
    for j, (name, row) in enumerate(zip(row_names, values, strict=True)):
        y = head + cell_height * j
        parts.append(_text(left - 8, y + 19, name, anchor="end"))
        for i, value in enumerate(row):
            x = left + cell * i
            share = _share(value, low, high)
            box = {"x": x + 1, "y": y + 1, "width": cell - 2, "height": cell_height - 2, "rx": 3}
            look = {"style": f"fill:var(--heat);fill-opacity:{0.06 + 0.5 * share:.2f}"}
            parts.append(_tag("rect", box | look))
            shown = "-" if value is None else f"{value:.3f}"
            parts.append(_text(x + cell / 2, y + 19, shown, anchor="middle"))
    spare = longest * _CHARACTER * 0.8 if is_turned else 8.0
    width = max(left + cell * len(columns) + spare, 200.0)
    height = head + cell_height * len(rows) + 4
    return _chart(parts, width=width, height=height, label="heat map", css="chart natural")


def stacked_bars(
    values: Sequence[Sequence[float]], *, rows: Sequence[str], parts: Sequence[str], unit: str
) -> str:
    """One horizontal bar a row, made of `parts` with values >= 0; its sum stands behind it."""
    names = [printable(name) for name in rows]
    left = max(map(len, names), default=0) * _CHARACTER + 12
    longest = max((sum(row) for row in values), default=0.0) or 1.0
    room = WIDTH - left - 62
    shapes = []
    for j, (name, row) in enumerate(zip(names, values, strict=True)):
        x, y = left, 8 + 26.0 * j
        shapes.append(_text(left - 8, y + 14, name, anchor="end"))
        for number, value in enumerate(row):
            width = value / longest * room
            box = {"x": x, "y": y, "width": width, "height": 20}
            shapes.append(_tag("rect", box | {"style": f"fill:var(--s{number % MAX_SERIES})"}))
            x += width
        shapes.append(_text(x + 5, y + 14, f"{sum(row):.2f} {unit}"))
    legend_top = 8 + 26.0 * len(rows) + 12
    shapes += _legend(list(parts), top=legend_top)
    height = legend_top + _LEGEND_ROW * -(-len(parts) // 2) - 6
    return _chart(shapes, width=WIDTH, height=height, label=f"stacked bars [{unit}]")


def standalone(markup: str) -> str:
    """A chart as an SVG file of its own, with its colours inside."""
    opened = markup.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    return opened.replace(">", f"><style>{STYLE}</style>", 1) + "\n"


def _chart(
    parts: Iterable[str], *, width: float, height: float, label: str, css: str = "chart"
) -> str:
    attributes = {
        "class": css,
        "viewBox": f"0 0 {width:.0f} {height:.0f}",
        "width": f"{width:.0f}",
        "height": f"{height:.0f}",
        "role": "img",
        "aria-label": label,
    }
    return _tag("svg", attributes, "".join(parts))


def _share(value: float | None, low: float, high: float) -> float:
    """Where `value` lies between `low` and `high`: a gap is lightest, a lone value in between."""
    if value is None:
        return 0.0
    return (value - low) / (high - low) if high > low else 0.5


def _tag(name: str, attributes: Mapping[str, str | float], content: str = "") -> str:
    """An element; attribute values are escaped, `content` is markup."""
    shown = {key: f"{v:.1f}" if isinstance(v, float) else str(v) for key, v in attributes.items()}
    inside = "".join(f' {key}="{html.escape(value)}"' for key, value in shown.items())
    return f"<{name}{inside}>{content}</{name}>"


def _text(x: float, y: float, text: str, *, anchor: str = "start", css: str = "") -> str:
    place: dict[str, str | float] = {"x": x, "y": y, "text-anchor": anchor}
    return _tag("text", place | ({"class": css} if css else {}), html.escape(text))


def _x_label(x: float, y: float, text: str, *, turned: bool, rising: bool = False) -> str:
    """A label below an axis, or above a column (`rising`); turned where it is too wide."""
    if not turned:
        return _text(x, y, text, anchor="middle")
    anchor = "start" if rising else "end"
    place: dict[str, str | float] = {"text-anchor": anchor}
    turn = {"transform": f"translate({x:.1f},{y - 3:.1f}) rotate(-35)"}
    return _tag("text", place | turn, html.escape(text))


def _line(x1: float, y1: float, x2: float, y2: float, *, style: str = "") -> str:
    ends: dict[str, str | float] = {"x1": x1, "y1": y1, "x2": x2, "y2": y2}
    return _tag("line", ends | ({"style": style} if style else {}))


def _whisker(x: float, figure: Estimate, number: int, low: float, high: float) -> str:
    if figure.low is None or figure.high is None:
        return ""
    return _line(x, low, x, high, style=f"stroke:var(--s{number});stroke-width:1.4")


def _marker(x: float, y: float, number: int) -> str:
    """Circle, square, diamond or triangle, filled with the colour of the series."""
    style = f"fill:var(--s{number});stroke:var(--page)"
    outlines = {1: "-4,-4 4,-4 4,4 -4,4", 2: "0,-5 5,0 0,5 -5,0", 3: "0,-5 5,4 -5,4"}
    if number % 4 == 0:
        return _tag("circle", {"cx": x, "cy": y, "r": "4", "style": style})
    corners = [pair.split(",") for pair in outlines[number % 4].split()]
    points = " ".join(f"{x + float(dx):.1f},{y + float(dy):.1f}" for dx, dy in corners)
    return _tag("polygon", {"points": points, "style": style})


def _legend(names: Sequence[str], *, top: float) -> list[str]:
    """Names with their markers in two columns."""
    parts = []
    for number, name in enumerate(names):
        x, y = 14.0 + (number % 2) * WIDTH / 2, top + _LEGEND_ROW * (number // 2)
        parts += [_marker(x, y - 4, number % MAX_SERIES), _text(x + 9, y, printable(name))]
    return parts


def _ticks(low: float, high: float) -> list[float]:
    """Four to six round numbers from `low`, which is round, to `high` or just above."""
    raw = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1.0, 2.0, 2.5, 5.0, 10.0) if m * power >= raw * (1 - 1e-9))
    return [low + step * i for i in range(math.ceil((high - low) / step - 1e-9) + 1)]


def _value(figure: Estimate) -> float:
    assert figure.value is not None, "an undefined figure must not be drawn"
    return figure.value


def _low(figure: Estimate) -> float:
    return _value(figure) if figure.low is None else figure.low


def _high(figure: Estimate) -> float:
    return _value(figure) if figure.high is None else figure.high
