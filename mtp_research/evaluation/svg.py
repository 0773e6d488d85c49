"""Charts as inline SVG: points with intervals, a heat map, stacked bars.

Last stage of the flow, used by `figures.py`. Standard library only. Colours are CSS variables of
`STYLE`, so that a page follows the reader's light or dark setting; series differ by marker as well
as by colour, and every part of a bar that has room shows its number. A chart is `WIDTH` units wide,
which is one column of a phone: there, a unit is about a pixel.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from mtp_research.evaluation.stats.bootstrap import Estimate
from mtp_research.evaluation.svg_parts import (
    MAX_SERIES,
    WIDTH,
    chart,
    heat_key,
    label_text,
    labels_above,
    labels_below,
    legend,
    line,
    marker,
    tag,
    text_at,
    text_width,
    three_digits,
    tick_text,
    ticks_over,
    whisker,
)
from mtp_research.evaluation.tables import printable

_PLOT_HEIGHT = 170.0
_LEFT, _RIGHT, _TOP = 44.0, 8.0, 22.0
_CELL_WIDTHS = (70.0, 104.0)  # least, which holds an interval, and most
_MAX_NAME_WIDTH = 150.0
_CELL_HEIGHT, _BAR_HEIGHT, _BAR_STEP = 40.0, 20.0, 26.0
_LINE_ABOVE = 14.0  # of a heat map's name of columns
_KEY_STEPS = 4


@dataclass(frozen=True)
class Series:
    """One line of a chart: a figure per position on the x axis; an undefined one is left out."""

    name: str
    points: tuple[Estimate, ...]


@dataclass(frozen=True)
class HeatAxes:
    """What a heat map's rows and columns are, and the unit of its values."""

    rows: str = "heads"
    columns: str = "decode policy"
    unit: str = "tokens per round"


@dataclass(frozen=True)
class Axes:
    """What a chart's axes say: names with units, and the ticks of x."""

    x: str
    y: str
    x_ticks: tuple[str, ...]


def interval_chart(
    series: Sequence[Series], *, axes: Axes, floor: float = 0.0, is_connected: bool = True
) -> str:
    """Points with whiskers from low to high, side by side at every x.

    Args:
        series: at most `MAX_SERIES` are drawn.
        axes: one x tick per point of every series.
        floor: lower end of the y axis.
        is_connected: join the points of a series; False where the order of x means nothing.
    """
    shown = series[:MAX_SERIES]
    drawn = [figure for one in shown for figure in one.points if figure.value is not None]
    top = max((_high(figure) for figure in drawn), default=floor + 1.0)
    ticks = ticks_over(floor, top if top > floor else floor + 1.0)
    slot = (WIDTH - _LEFT - _RIGHT) / max(len(axes.x_ticks), 1)
    bottom = _TOP + _PLOT_HEIGHT
    names, label_height = labels_below(axes.x_ticks, left=_LEFT, slot=slot, top=bottom)

    def y_of(value: float) -> float:
        return bottom - (value - ticks[0]) / (ticks[-1] - ticks[0]) * _PLOT_HEIGHT

    parts = [text_at(4, 12, axes.y, css="soft")]
    for tick in ticks:
        css = "zero" if tick == 0 and ticks[0] < 0 else ""
        parts.append(line(_LEFT, y_of(tick), WIDTH - _RIGHT, y_of(tick), css=css))
        parts.append(
            text_at(_LEFT - 5, y_of(tick) + 4, tick_text(tick, largest=ticks[-1]), anchor="end")
        )
    parts += names
    for number, one in enumerate(shown):
        # Neighbouring series stand apart, so that their whiskers do not cover each other.
        shift = min(9.0, slot / (len(shown) + 1)) * (number - (len(shown) - 1) / 2)
        centres = [_LEFT + slot * (i + 0.5) + shift for i in range(len(axes.x_ticks))]
        pairs = [(x, f) for x, f in zip(centres, one.points, strict=True) if f.value is not None]
        if is_connected and len(pairs) > 1:
            path = " ".join(f"{x:.1f},{y_of(_value(f)):.1f}" for x, f in pairs)
            colour = {"points": path, "class": "line", "style": f"stroke:var(--s{number})"}
            parts.append(tag("polyline", colour))
        parts += [
            whisker(x, y_of(_low(f)), y_of(_high(f)), number) for x, f in pairs if f.low is not None
        ]
        parts += [marker(x, y_of(_value(f)), number) for x, f in pairs]
    name_y = bottom + label_height + 14
    middle = (_LEFT + WIDTH - _RIGHT) / 2
    parts.append(text_at(middle, name_y, axes.x, anchor="middle", css="soft"))
    items, height = legend([one.name for one in shown], top=name_y + 20)
    return chart([*parts, *items], width=WIDTH, height=height, label=f"{axes.y} by {axes.x}")


def heat_map(
    values: Sequence[Sequence[Estimate]],
    *,
    rows: Sequence[str],
    columns: Sequence[str],
    axes: HeatAxes = HeatAxes(),
    outlined: Collection[tuple[int, int]] = (),
) -> str:
    """A matrix of figures with their intervals; the more colour in a cell, the larger its value.

    Args:
        values: one row per entry of `rows`; an undefined cell shows a dash.
        rows: names.
        columns: names.
        axes: what rows, columns and values are.
        outlined: (row, column) of cells that get a frame.
    """
    row_names = [printable(name) for name in rows]
    left = max(map(text_width, [*row_names, axes.rows])) + 12
    share = (WIDTH - left - 2) / max(len(columns), 1)
    cell = min(max(share, _CELL_WIDTHS[0]), _CELL_WIDTHS[1])
    names, head = labels_above(columns, left=left, slot=cell, top=_LINE_ABOVE)
    middle = left + cell * len(columns) / 2
    parts = [*names, text_at(left - 8, head - 7, axes.rows, anchor="end", css="soft"),
             text_at(middle, 12, axes.columns, anchor="middle", css="soft")]  # fmt: skip
    known = [figure.value for row in values for figure in row if figure.value is not None]
    low, high = min(known, default=0.0), max(known, default=1.0)
    for j, (name, row) in enumerate(zip(row_names, values, strict=True)):
        y = head + _CELL_HEIGHT * j
        parts.append(text_at(left - 8, y + 24, name, anchor="end"))
        for i, figure in enumerate(row):
            x = left + cell * i
            if figure.value is None:
                parts.append(text_at(x + cell / 2, y + 24, "-", anchor="middle"))
                continue
            opacity = _opacity(_share(figure.value, low, high))
            box = {"x": x + 1, "y": y + 1, "width": cell - 2, "height": _CELL_HEIGHT - 2, "rx": 3}
            frame = ";stroke:var(--ink);stroke-width:1.5" if (j, i) in outlined else ""
            look = {"style": f"fill:var(--heat);fill-opacity:{opacity:.2f}{frame}"}
            parts += [tag("rect", box | look), *_cell_texts(x + cell / 2, y, figure)]
    width = max(left + cell * len(columns) + 2, WIDTH)
    css = "chart" if width <= WIDTH else "chart natural"
    height = head + _CELL_HEIGHT * len(rows) + 4
    if high > low and known:
        shades = [_opacity(step / _KEY_STEPS) for step in range(_KEY_STEPS + 1)]
        ends = {"low": f"{low:.2f}", "high": f"{high:.2f}"}
        parts += heat_key(shades, unit=axes.unit, y=height + 12, **ends)
        height += 18
    return chart(
        parts,
        width=width,
        height=height,
        label=f"{axes.unit} by {axes.rows} and {axes.columns}",
        css=css,
    )


def stacked_bars(
    values: Sequence[Sequence[float]], *, rows: Sequence[str], parts: Sequence[str], unit: str
) -> str:
    """One horizontal bar a row, made of `parts` with values >= 0; its sum stands behind it."""
    names = [label_text(name) for name in rows]
    widest = max(map(text_width, names), default=0.0)
    # Long names stand above their bars, which would have no room beside them.
    is_above = widest > _MAX_NAME_WIDTH
    left, step = (2.0, _BAR_STEP + 16) if is_above else (widest + 12, _BAR_STEP)
    longest = max((sum(row) for row in values), default=0.0) or 1.0
    room = WIDTH - left - 62
    shapes = []
    for j, (name, row) in enumerate(zip(names, values, strict=True)):
        x, y = left, 8 + step * j + (16 if is_above else 0)
        if is_above:
            shapes.append(text_at(left, y - 4, name))
        else:
            shapes.append(text_at(left - 8, y + 14, name, anchor="end"))
        for number, value in enumerate(row):
            width, shown = value / longest * room, three_digits(value)
            box = {"x": x, "y": y, "width": width, "height": _BAR_HEIGHT}
            look = {"style": f"fill:var(--s{number % MAX_SERIES});stroke:var(--page)"}
            shapes.append(tag("rect", box | look))
            if width > text_width(shown) + 4:
                middle = x + width / 2
                shapes.append(text_at(middle, y + 14, shown, anchor="middle", css="inside"))
            x += width
        shapes.append(text_at(x + 5, y + 14, f"{three_digits(sum(row))} {unit}"))
    items, height = legend(list(parts), top=8 + step * len(rows) + 12, is_square=True)
    return chart([*shapes, *items], width=WIDTH, height=height, label=f"stacked bars [{unit}]")


def _cell_texts(x: float, y: float, figure: Estimate) -> list[str]:
    """A heat map's number, and its interval below where it has one."""
    if figure.low is None or figure.high is None:
        return [text_at(x, y + 24, f"{figure.value:.3f}", anchor="middle")]
    between = f"{figure.low:.2f} to {figure.high:.2f}"
    return [
        text_at(x, y + 18, f"{figure.value:.3f}", anchor="middle"),
        text_at(x, y + 32, between, anchor="middle", css="small"),
    ]


def _share(value: float, low: float, high: float) -> float:
    """Where `value` lies between `low` and `high`; a lone value lies in between."""
    return (value - low) / (high - low) if high > low else 0.5


def _opacity(share: float) -> float:
    """Of a cell's colour, by where its value lies between the least and the greatest."""
    return 0.06 + 0.5 * share


def _value(figure: Estimate) -> float:
    assert figure.value is not None, "an undefined figure must not be drawn"
    return figure.value


def _low(figure: Estimate) -> float:
    return _value(figure) if figure.low is None else figure.low


def _high(figure: Estimate) -> float:
    return _value(figure) if figure.high is None else figure.high
