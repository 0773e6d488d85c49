"""What the charts of `svg.py` are made of: escaped SVG elements, markers, legend, colours.

Standard library only. The colours are told apart with the common forms of colour blindness and
stand out from the page in its light and its dark form (`tests/evaluation/test_svg.py` computes
both).
"""

import html
import math
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from mtp_research.evaluation.tables import MAX_LABEL_CHARACTERS, printable

MAX_SERIES = 8
WIDTH = 360.0
CHARACTER = 6.2  # units of a character, about
_WIDE = 11.0  # of a wide one
LEGEND_ROW = 16.0
_LINE = 12.0
STYLE = """
svg,:root{--ink:#1b1f24;--soft:#5c6670;--rule:#d9dee3;--page:#fff;--band:#0000000a;--shade:#0004;--heat:#2a78d6;
--s0:#0072b2;--s1:#c24e00;--s2:#00815f;--s3:#a8447f;--s4:#8a6a00;--s5:#5b4bc4;--s6:#7a5230;--s7:#555}
@media screen and (prefers-color-scheme:dark){svg,:root{--ink:#e8ebee;--soft:#9aa5b0;--rule:#333b44;
--page:#14181d;--band:#ffffff0d;--shade:#ffffff47;--heat:#4b93e6;--s0:#56b4e9;--s1:#ff9a4d;--s2:#3cc9a0;--s3:#e58ac0;--s4:#e3c04b;
--s5:#a99cff;--s6:#b3865c;--s7:#ececec}}
.chart text{font:11px system-ui,sans-serif;fill:var(--ink)}.chart .soft{fill:var(--soft)}
.chart .small{font-size:10px}.chart .inside{fill:var(--page)}
.chart line{stroke:var(--rule)}.chart .zero{stroke:var(--soft)}
.chart .line{fill:none;stroke-width:1.6}
"""


def ticks_over(low: float, high: float) -> list[float]:
    """Four to seven round numbers from `low`, which is round, to `high` or just above.

    A scale that begins below 0 begins at a multiple of its step, so that 0 is on it.
    """
    raw = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1.0, 2.0, 2.5, 5.0, 10.0) if m * power >= raw * (1 - 1e-9))
    start = step * math.floor(low / step + 1e-9) if low < 0 else low
    count = math.ceil((high - start) / step - 1e-9) + 1
    return [round(start + step * i, 9) + 0.0 for i in range(count)]  # no 2.8e-17, no -0


def tick_text(value: float, *, largest: float) -> str:
    """A tick of a scale up to `largest`, in thousands where it would not fit beside the chart."""
    return f"{value / 1e3:g}k" if value and largest >= 1e5 else f"{value:g}"


def chart(
    parts: Iterable[str], *, width: float, height: float, label: str, css: str = "chart"
) -> str:
    """The `svg` element around its parts, in user units of about a pixel."""
    attributes = {
        "class": css,
        "viewBox": f"0 0 {width:.0f} {height:.0f}",
        "width": f"{width:.0f}",
        "height": f"{height:.0f}",
        "role": "img",
        "aria-label": label,
    }
    return tag("svg", attributes, "".join(parts))


def standalone(markup: str, *, description: str = "") -> str:
    """A chart as an SVG file of its own, with its colours inside.

    Args:
        markup: of `svg.py`.
        description: how the numbers were made; programs that show SVG keep it.
    """
    opened = markup.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    inside = f"<desc>{html.escape(description)}</desc><style>{STYLE}</style>"
    return opened.replace(">", f">{inside}", 1) + "\n"


def tag(name: str, attributes: Mapping[str, str | float], content: str = "") -> str:
    """An element; attribute values are escaped, `content` is markup."""
    shown = {key: f"{v:.1f}" if isinstance(v, float) else str(v) for key, v in attributes.items()}
    inside = "".join(f' {key}="{html.escape(value)}"' for key, value in shown.items())
    return f"<{name}{inside}>{content}</{name}>"


def text_at(x: float, y: float, text: str, *, anchor: str = "start", css: str = "") -> str:
    """Escaped text; `anchor` is its point at x."""
    place: dict[str, str | float] = {"x": x, "y": y, "text-anchor": anchor}
    return tag("text", place | ({"class": css} if css else {}), html.escape(text))


def label_text(label: str) -> str:
    """A condition's label, of which more is kept than of other names: its end tells the setting."""
    return printable(label, limit=MAX_LABEL_CHARACTERS)


def text_width(text: str) -> float:
    """Units that a text takes, about; wide letters and East Asian ones take more."""
    num_wide = sum(c in "MWmw@%" or unicodedata.east_asian_width(c) in "WF" for c in text)
    return CHARACTER * len(text) + (_WIDE - CHARACTER) * num_wide


def three_digits(value: float) -> str:
    """At least three digits and no exponent: 0.0404, 2.70, 25.0, 1234."""
    digits = 2 - math.floor(math.log10(abs(value))) if value else 0
    return f"{value:.{min(max(digits, 0), 6)}f}"


class AxisLabels(NamedTuple):
    """Names beside an axis, and how much room they take."""

    elements: list[str]
    height: float


def labels_below(names: Sequence[str], *, left: float, slot: float, top: float) -> AxisLabels:
    """Centred names below an axis, one a slot, on several lines where they are long.

    Args:
        names: of the slots.
        left: where the first slot begins.
        slot: width of one.
        top: end of the axis.
    """
    lines = [_wrapped(printable(name), slot - 4) for name in names]
    elements = [
        text_at(left + slot * (i + 0.5), top + 15 + _LINE * j, part, anchor="middle")
        for i, parts in enumerate(lines)
        for j, part in enumerate(parts)
    ]
    return AxisLabels(elements, 16 + _LINE * (max(map(len, lines), default=1) - 1))


def labels_above(names: Sequence[str], *, left: float, slot: float, top: float) -> AxisLabels:
    """The same from `top` on, above a matrix that begins `height` below the top of the chart."""
    lines = [_wrapped(printable(name), slot - 4) for name in names]
    most = max(map(len, lines), default=1)
    elements = [
        text_at(left + slot * (i + 0.5), top + 13 + _LINE * (most - len(parts) + j), part,
                anchor="middle")
        for i, parts in enumerate(lines)
        for j, part in enumerate(parts)
    ]  # fmt: skip
    return AxisLabels(elements, top + 20 + _LINE * (most - 1))


def _wrapped(name: str, room: float) -> list[str]:
    """A name on several lines: broken at spaces and after `_` and `-`, else where it must be."""
    lines = [""]
    for word in re.findall(r"[^ _-]*[ _-]?", name):
        if lines[-1] and text_width(lines[-1] + word.rstrip()) > room:
            lines.append("")
        lines[-1] += word
    parts = [part.strip() for part in lines if part.strip()]
    return [piece for part in parts for piece in _cut(part, room)] or [""]


def _cut(part: str, room: float) -> list[str]:
    """A word without a place to break, cut wherever the room ends."""
    limit = max(int(room * len(part) / text_width(part)), 1)
    return [part[i : i + limit] for i in range(0, len(part), limit)]


def line(x1: float, y1: float, x2: float, y2: float, *, style: str = "", css: str = "") -> str:
    """A straight line."""
    ends: dict[str, str | float] = {"x1": x1, "y1": y1, "x2": x2, "y2": y2}
    look = {"class": css, "style": style}
    return tag("line", ends | {key: value for key, value in look.items() if value})


def heat_key(shades: Sequence[float], *, low: str, high: str, unit: str, y: float) -> list[str]:
    """The scale of a heat map in one row: its least value, its shades, its greatest, the unit.

    Args:
        shades: opacities from the least value to the greatest.
        low: the least value as text.
        high: the greatest.
        unit: of both.
        y: base line of the row.
    """
    start, width = 10 + text_width(low), 14.0
    ends = [start + width * i for i in range(len(shades) + 1)]
    swatches = [
        line(x, y - 4, x + width, y - 4,
             style=f"stroke:var(--heat);stroke-width:11;stroke-opacity:{shade:.2f}")
        for x, shade in zip(ends, shades, strict=False)
    ]  # fmt: skip
    texts = text_at(4, y, low), text_at(ends[-1] + 6, y, f"{high} {unit}")
    return [*swatches, *texts]


def whisker(x: float, low: float, high: float, number: int) -> str:
    """An interval, in the colour of the series."""
    return line(x, low, x, high, style=f"stroke:var(--s{number});stroke-width:1.4")


def marker(x: float, y: float, number: int) -> str:
    """Circle, square, diamond or triangle, filled with the colour of the series."""
    style = f"fill:var(--s{number});stroke:var(--page)"
    outlines = {1: "-4,-4 4,-4 4,4 -4,4", 2: "0,-5 5,0 0,5 -5,0", 3: "0,-5 5,4 -5,4"}
    if number % 4 == 0:
        return tag("circle", {"cx": x, "cy": y, "r": "4", "style": style})
    corners = [pair.split(",") for pair in outlines[number % 4].split()]
    points = " ".join(f"{x + float(dx):.1f},{y + float(dy):.1f}" for dx, dy in corners)
    return tag("polygon", {"points": points, "style": style})


class Legend(NamedTuple):
    """Elements of a legend, and where a chart that ends with it ends."""

    elements: list[str]
    bottom: float


def legend(names: Sequence[str], *, top: float, is_square: bool = False) -> Legend:
    """Names with their markers in as many columns as they have room for, at most four.

    Args:
        names: of the series, in their order.
        top: base line of the first row.
        is_square: the same square for each, as for the parts of a bar.
    """
    shown = [label_text(name) for name in names]
    widest = max(map(text_width, shown), default=0.0) + 26
    columns = max(1, min(4, int(WIDTH // widest), len(shown)))
    elements = []
    for number, name in enumerate(shown):
        x = 12.0 + (number % columns) * WIDTH / columns
        y = top + LEGEND_ROW * (number // columns)
        if is_square:
            box = {"x": x - 4, "y": y - 8, "width": "8", "height": "8"}
            look = {"style": f"fill:var(--s{number % MAX_SERIES})"}
            elements.append(tag("rect", box | look))
        else:
            elements.append(marker(x, y - 4, number % MAX_SERIES))
        elements.append(text_at(x + 9, y, name))
    rows = -(-len(shown) // columns)
    return Legend(elements, top + LEGEND_ROW * max(rows - 1, 0) + 8)
