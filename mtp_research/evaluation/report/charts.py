"""The charts of a report: matplotlib figures of rows of the frame, saved as svg, pdf and png.

One style for all (`STYLE`); matplotlib's figure objects without pyplot, so that no state is shared.
Colours are literal and text stays text, so that any program shows the svg; series differ by marker
as well as by colour. On a page, a point shows its number under the mouse by its `<title>`.
"""

# pandas ships no stubs, so that a selection of rows is taken for a Series, a DataFrame or an array.
# pyright: reportArgumentType=false, reportReturnType=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false

import html
import io
import math
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

MAX_SERIES = 8
COLOURS = (
    "#0072b2", "#c24e00", "#00815f", "#a8447f", "#8a6a00", "#5b4bc4", "#7a5230", "#555555",
)  # fmt: skip
_MARKERS = "os^DvPX*"
_INK, _SOFT, _RULE = "#1b1f24", "#5c6670", "#d9dee3"
STYLE = {
    "axes.axisbelow": True,
    "axes.edgecolor": _SOFT,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.labelcolor": _SOFT,
    "axes.linewidth": 0.6,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.dpi": 160,
    "font.family": ["DejaVu Sans", "sans-serif"],
    "font.size": 8.5,
    "grid.color": _RULE,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "lines.linewidth": 1.3,
    "lines.markersize": 4.5,
    "svg.fonttype": "none",
    "svg.hashsalt": "mtp_research",
    "text.color": _INK,
    "text.parse_math": False,  # a $ of a name is a dollar
    "xtick.color": _SOFT,
    "xtick.labelcolor": _INK,
    "ytick.color": _SOFT,
    "ytick.labelcolor": _INK,
}
_WIDTH, _HEIGHT = 4.4, 2.7  # inches; a column of a phone
_SHADES = 32
_PAD = 0.12  # between a bar and its sum, of the width


@dataclass(frozen=True)
class Chart:
    """What is shown, the drawing, and what a reader has to know."""

    title: str  # unique in its section
    figure: Figure
    note: str = ""  # how to read it
    hover: Mapping[str, str] = field(default_factory=dict)  # text by the id of a point

    @property
    def stem(self) -> str:
        """The title as a file name."""
        return slug(self.title)

    @property
    def is_wide(self) -> bool:
        """Too wide for a column of a page."""
        return self.figure.get_figwidth() > 1.2 * _WIDTH


@dataclass(frozen=True)
class Missing:
    """A chart that cannot be drawn, and why."""

    title: str
    reason: str


def slug(text: str) -> str:
    """A name made of lower-case letters, digits and dashes, at most 60 characters."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:60] or "untitled"


def chart_files(chart: Chart, *, description: str) -> dict[str, bytes]:
    """The chart by file ending; programs that show it keep the description."""
    dates = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "png": {}}
    about = {"svg": "Description", "pdf": "Subject", "png": "Description"}
    files = {}
    with matplotlib.rc_context(STYLE):
        chart.figure.draw_without_rendering()
        # Laid out once for all kinds; a placeholder ("none") would have each kind drawn twice.
        chart.figure.set_layout_engine(None)
        for kind, metadata in dates.items():
            text = "".join(c for c in description if c.isprintable())
            buffer = io.BytesIO()
            known = {"Title": chart.title, about[kind]: text} | metadata
            chart.figure.savefig(buffer, format=kind, metadata=known)
            files[kind] = buffer.getvalue()
    files["svg"] = _with_hover(files["svg"].decode(), chart.hover).encode()
    return files


def inline_svg(chart: Chart, svg: bytes) -> str:
    """The svg of `chart_files` as a part of a page: no head, no metadata, sized by the page."""
    text = svg.decode()
    text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", text[text.index("<svg"):],
                  flags=re.DOTALL)  # fmt: skip
    text = re.sub(r' xmlns(:\w+)?="[^"]*"| version="1.1"', "", text, count=3)
    text = re.sub(r'<g id="(?:figure|axes|patch|line2d|text|legend|matplotlib)[^"]*"', "<g", text)
    label = html.escape(chart.title)
    return text.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)


def interval_chart(
    title: str, data: pd.DataFrame, *, x: str, y: str, floor: float | None = 0.0,
    is_connected: bool = True, note: str = "",
) -> Chart:  # fmt: skip
    """Points with whiskers from low to high, series side by side at every tick.

    `data` has `series`, `tick`, `value`, `low`, `high`; the first `MAX_SERIES` series are drawn.
    With `floor` None the data decide where y begins; points of a series are joined if
    `is_connected`, which an order of ticks that means nothing forbids.
    """
    names = list(dict.fromkeys(data["series"]))[:MAX_SERIES]
    ticks = list(dict.fromkeys(data["tick"]))
    hover: dict[str, str] = {}
    with matplotlib.rc_context(STYLE):
        figure, axes = _new(height=_HEIGHT + 0.16 * len(names) / _per_row(names))
        step = min(0.09, 0.8 / (len(names) + 1))
        handles = []
        for number, name in enumerate(names):
            own = data[(data["series"] == name) & data["value"].notna()]
            places = np.array([ticks.index(tick) for tick in own["tick"]], dtype=float)
            places += step * (number - (len(names) - 1) / 2)
            look = {"color": COLOURS[number], "marker": _MARKERS[number]}
            has_ends = own["low"].notna().to_numpy()
            low, high = own[["low", "high"]].to_numpy()[has_ends].T
            axes.vlines(places[has_ends], low, high, color=COLOURS[number], linewidth=1)
            style = "-" if is_connected else "none"
            handles += axes.plot(places, own["value"], linestyle=style, **look)
            for place, (_, one) in zip(places, own.iterrows(), strict=True):
                point = f"point-{len(hover)}"
                axes.plot([place], [one["value"]], linestyle="none", gid=point, **look)
                hover[point] = f"{name}, {one['tick']}: {_in_words(one)}"
        _name_ticks(axes, ticks)
        axes.set(xlabel=x, ylabel=y)
        if floor is not None:
            axes.set_ylim(bottom=floor)
        if axes.get_ylim()[0] < 0:
            axes.axhline(0, color=_SOFT, linewidth=0.8)
        _legend(figure, handles, names)
    return Chart(title, figure, note, hover)


def curves(
    title: str, lines: Mapping[str, tuple[Sequence[float], Sequence[float]]], *, x: str, y: str,
    note: str = "",
) -> Chart:  # fmt: skip
    """Lines by name: x and y of their points."""
    with matplotlib.rc_context(STYLE):
        figure, axes = _new()
        handles = []
        for number, (places, values) in enumerate(list(lines.values())[:MAX_SERIES]):
            marker = _MARKERS[number] if len(places) <= 40 else None
            handles += axes.plot(places, values, color=COLOURS[number], marker=marker)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set(xlabel=x, ylabel=y)
        _legend(figure, handles, list(lines)[:MAX_SERIES])
    return Chart(title, figure, note)


def grouped_bars(title: str, data: pd.DataFrame, *, x: str, y: str, note: str = "") -> Chart:
    """Bars by `tick` and `series`, side by side; shares of a whole."""
    names = list(dict.fromkeys(data["series"]))[:MAX_SERIES]
    ticks = list(dict.fromkeys(data["tick"]))
    hover, handles = {}, []
    with matplotlib.rc_context(STYLE):
        figure, axes = _new()
        width = 0.8 / len(names)
        for number, name in enumerate(names):
            own = data[data["series"] == name]
            places = [ticks.index(tick) + width * (number - (len(names) - 1) / 2)
                      for tick in own["tick"]]  # fmt: skip
            bars = axes.bar(places, own["value"], width * 0.92, color=COLOURS[number])
            for bar, (_, one) in zip(bars, own.iterrows(), strict=True):
                bar.set_gid(f"bar-{len(hover)}")
                hover[f"bar-{len(hover)}"] = f"{name}, {one['tick']}: {_in_words(one)}"
            handles.append(bars)
        _name_ticks(axes, ticks)
        axes.set(xlabel=x, ylabel=y)
        _legend(figure, handles, names)
    return Chart(title, figure, note, hover)


def heat_map(title: str, cells: pd.DataFrame, *, rows: str, unit: str, note: str = "") -> Chart:
    """A matrix of figures with their intervals; the more colour, the larger the value.

    `cells` has `row`, `column`, `value`, `low`, `high` and `is_match`, which gets a frame.
    """
    names, columns = (list(dict.fromkeys(cells[key])) for key in ("row", "column"))
    values = np.full((len(names), len(columns)), np.nan)
    longest = max(map(len, names), default=0)
    with matplotlib.rc_context(STYLE):
        size = (1.2 + 0.075 * longest + 0.95 * len(columns), 1.2 + 0.42 * len(names))
        figure, axes = _new(*size)
        axes.grid(visible=False)
        for _, one in cells.iterrows():
            j, i = names.index(one["row"]), columns.index(one["column"])
            values[j, i] = one["value"]
            has_ends = not pd.isna(one["low"])
            shown = "-" if pd.isna(one["value"]) else f"{one['value']:.3f}"
            axes.text(i, j - 0.12 * has_ends, shown, ha="center", va="center")
            if has_ends:
                between = f"{one['low']:.2f} to {one['high']:.2f}"
                axes.text(i, j + 0.24, between, ha="center", va="center", fontsize=6.5)
            if one["is_match"]:
                box = Rectangle((i - 0.47, j - 0.46), 0.94, 0.92, fill=False, ec=_INK, zorder=3)
                axes.add_patch(box)
        blues = matplotlib.colormaps["Blues"](np.linspace(0.04, 0.55, _SHADES))
        edges = (np.arange(len(side) + 1) - 0.5 for side in (columns, names))
        axes.pcolormesh(*edges, values, cmap=ListedColormap(blues), edgecolors="white", linewidth=2)
        axes.invert_yaxis()
        axes.set_xticks(range(len(columns)), [textwrap.fill(name, 13) for name in columns])
        axes.set_yticks(range(len(names)), names)
        axes.set(xlabel="decode policy", ylabel=rows)
        axes.tick_params(length=0)
    return Chart(title, figure, note)


def stacked_bars(title: str, data: pd.DataFrame, *, unit: str, note: str = "") -> Chart:
    """One horizontal bar for each row of `data`, made of its columns; the sum stands behind it."""
    hover, handles = {}, []
    with matplotlib.rc_context(STYLE):
        figure, axes = _new(height=0.9 + 0.3 * len(data))
        axes.grid(visible=False)
        axes.grid(visible=True, axis="x")
        left, total = np.zeros(len(data)), data.sum(axis=1).to_numpy()
        places, longest = np.arange(len(data)), max(total, default=0.0) or 1.0
        for number, part in enumerate(data.columns):
            width = data[part].to_numpy()
            bars = axes.barh(places, width, 0.7, left=left, color=COLOURS[number])
            for bar, name, start, value in zip(bars, data.index, left, width, strict=True):
                bar.set_gid(f"bar-{len(hover)}")
                hover[f"bar-{len(hover)}"] = f"{name}, {part}: {three_digits(value)} {unit}"
                if value > 0.09 * longest:
                    axes.text(start + value / 2, bar.get_y() + 0.35, three_digits(value),
                              color="white", ha="center", va="center", fontsize=7)  # fmt: skip
            handles.append(bars)
            left = left + width
        for place, value in zip(places, total, strict=True):
            axes.text(value + 0.01 * longest, place, f"{three_digits(value)} {unit}", va="center")
        axes.set_yticks(places, [textwrap.fill(str(name), 24) for name in data.index])
        axes.set(xlabel=unit, xlim=(0, longest * (1 + 2 * _PAD)), ylim=(len(data) - 0.5, -0.5))
        _legend(figure, handles, list(data.columns))
    return Chart(title, figure, note, hover)


def three_digits(value: float) -> str:
    """At least three digits and no exponent: 0.0404, 2.70, 25.0, 1234."""
    digits = 2 - math.floor(math.log10(abs(value))) if value else 0
    return f"{value:.{min(max(digits, 0), 6)}f}"


def _new(width: float = _WIDTH, height: float = _HEIGHT) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def _name_ticks(axes: Axes, ticks: Sequence[str]) -> None:
    """Long names on several lines, aslant where even their words are too long."""
    room = max(5, 56 // max(len(ticks), 1))
    names = [textwrap.fill(name, room, break_long_words=False) for name in ticks]
    is_long = any(len(line) > room for name in names for line in name.split("\n"))
    slant = {"rotation": 30, "ha": "right"} if is_long else {}
    axes.set_xticks(range(len(ticks)), list(ticks) if is_long else names, **slant)
    axes.set_xlim(-0.5, len(ticks) - 0.5)


def _per_row(names: Sequence[str]) -> int:
    """Names of a legend that fit side by side."""
    return max(1, min(len(names), 56 // (max(map(len, names), default=1) + 5)))


def _legend(figure: Figure, handles: Sequence, names: Sequence[str]) -> None:
    # matplotlib leaves out what begins with an underscore.
    shown = [f" {name}" if name.startswith("_") else name for name in names]
    figure.legend(handles, shown, loc="outside lower center", ncols=_per_row(shown))


def _in_words(one: pd.Series) -> str:
    if pd.isna(one["low"]):
        return f"{one['value']:.4g}"
    return f"{one['value']:.4g} [{one['low']:.4g}, {one['high']:.4g}]"


def _with_hover(svg: str, hover: Mapping[str, str]) -> str:
    """The svg with a `<title>` in every point that has a text."""

    def titled(match: re.Match[str]) -> str:
        return f"<g><title>{html.escape(hover[match[1]])}</title>"

    pattern = "|".join(map(re.escape, hover))
    return re.sub(f'<g id="({pattern})">', titled, svg) if hover else svg
