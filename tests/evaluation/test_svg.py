import math
import re
import xml.etree.ElementTree as ET

import pytest

from mtp_research.evaluation.stats.bootstrap import Estimate
from mtp_research.evaluation.svg import (
    Axes,
    HeatAxes,
    Series,
    heat_map,
    interval_chart,
    stacked_bars,
)
from mtp_research.evaluation.svg_parts import (
    MAX_SERIES,
    STYLE,
    WIDTH,
    standalone,
    text_width,
    three_digits,
    ticks_over,
)

CURVE = Series("eagle", (Estimate(0.8, 0.7, 0.9), Estimate(0.5, 0.4, 0.6)))


def numbers(markup: str) -> list[float]:
    """Every coordinate of a chart."""
    found = []
    for element in ET.fromstring(markup).iter():
        for key, value in element.attrib.items():
            if key in {"x", "y", "x1", "x2", "y1", "y2", "cx", "cy", "width", "height", "points"}:
                found += [float(part) for part in value.replace(",", " ").split()]
    return found


def whiskers(markup: str) -> list[tuple[float, float]]:
    lines = [e for e in ET.fromstring(markup).iter("line") if "style" in e.attrib]
    return [(float(e.attrib["y1"]), float(e.attrib["y2"])) for e in lines]


def test_whisker_spans_the_interval_on_the_axis() -> None:
    markup = interval_chart([CURVE], axes=Axes("position", "p_i", ("1", "2")))
    texts = [e.text for e in ET.fromstring(markup).iter("text")]
    assert texts[1:7] == ["0", "0.2", "0.4", "0.6", "0.8", "1"]
    (low, high), (low_2, high_2) = whiskers(markup)
    assert low - high == pytest.approx(0.2 * 170, abs=0.11)  # the axis from 0 to 1 is 170 high
    assert low_2 - low == pytest.approx(0.3 * 170, abs=0.11)
    assert low_2 - high_2 == pytest.approx(0.2 * 170, abs=0.11)


def test_undefined_points_draw_nothing_and_empty_charts_stay_finite() -> None:
    nothing = Series("eagle", (Estimate(None), Estimate(None)))
    markup = interval_chart([nothing], axes=Axes("position", "p_i", ("1", "2")))
    assert not whiskers(markup)
    assert all(map(math.isfinite, numbers(markup)))
    for empty in (
        interval_chart([], axes=Axes("position", "p_i", ())),
        heat_map([], rows=[], columns=[]),
        stacked_bars([], rows=[], parts=["a"], unit="s"),
    ):
        assert all(map(math.isfinite, numbers(empty)))


def test_whisker_that_ends_at_zero_is_drawn_and_all_zero_has_a_plain_axis() -> None:
    touching = Series("eagle", (Estimate(0.1, 0.0, 0.2), Estimate(0.0, 0.0, 0.0)))
    assert len(whiskers(interval_chart([touching], axes=Axes("x", "y", ("1", "2"))))) == 2
    zero = Series("eagle", (Estimate(0.0, 0.0, 0.0),))
    markup = interval_chart([zero], axes=Axes("x", "y", ("1",)))
    assert [e.text for e in ET.fromstring(markup).iter("text")][1:4] == ["0", "0.2", "0.4"]


def test_names_are_escaped_and_bounded() -> None:
    bad = "<script>&\"'" + "\x00" + "x" * 500
    for markup in (
        interval_chart([Series(bad, CURVE.points)], axes=Axes("x", "p_i", (bad, "2"))),
        heat_map([[Estimate(1.0)]], rows=[bad], columns=[bad]),
        stacked_bars([[1.0]], rows=[bad], parts=[bad], unit="s"),
    ):
        texts = [e.text or "" for e in ET.fromstring(markup).iter("text")]  # parses: well formed
        assert "<script" not in markup
        assert max(map(len, texts)) <= 48


def test_heat_map_darkens_with_the_value_and_marks_gaps_and_matches() -> None:
    values = [[Estimate(1.0), Estimate(3.0, 2.5, 3.5)], [Estimate(2.0), Estimate(None)]]
    markup = heat_map(values, rows=["a", "b"], columns=["x", "y"], outlined={(0, 1)})
    root = ET.fromstring(markup)
    styles = [e.attrib["style"].split(";") for e in root.iter("rect")]
    assert [float(style[1].rpartition(":")[2]) for style in styles] == [0.06, 0.56, 0.31]
    assert ["stroke:var(--ink)" in style for style in styles] == [False, True, False]
    texts = [e.text for e in root.iter("text")]
    assert texts.count("-") == 1
    assert "2.50 to 3.50" in texts


def test_heat_map_names_its_axes_and_keys_its_colours() -> None:
    values = [[Estimate(1.0), Estimate(3.0)]]
    root = ET.fromstring(heat_map(values, rows=["a"], columns=["x", "y"], axes=HeatAxes(unit="s")))
    texts = [e.text for e in root.iter("text")]
    assert {"heads", "decode policy", "1.00", "3.00 s"} <= set(texts)
    assert root.attrib["aria-label"] == "s by heads and decode policy"
    swatches = [e.attrib["style"].rpartition(":")[2] for e in root.iter("line")]
    cells = [e.attrib["style"].rpartition(":")[2] for e in root.iter("rect")]
    assert swatches == sorted(swatches)
    assert [swatches[0], swatches[-1]] == cells  # the colours of the least and of the greatest
    alike = heat_map([[Estimate(2.0)] * 2], rows=["a"], columns=["x", "y"])
    assert not list(ET.fromstring(alike).iter("line"))  # a lone value has no scale


def test_long_names_break_into_lines_within_their_cell() -> None:
    columns = ["training as pre_norm", "eagle_norefresh", "x" * 24]
    root = ET.fromstring(heat_map([[Estimate(1.0)] * 3], rows=["a" * 20], columns=columns))
    texts = [e.text or "" for e in root.iter("text")]
    assert {"training as", "pre_norm", "eagle_", "norefresh"} <= set(texts)
    others = {"a" * 20, "decode policy"}
    assert max(len(text) for text in texts if text not in others) == 11  # of 70 units
    assert float(root.attrib["width"]) == WIDTH


def test_wide_letters_take_more_room() -> None:
    assert text_width("W" * 10) > 1.7 * text_width("a" * 10)
    assert text_width("\u6f22" * 10) == text_width("W" * 10)
    narrow, wide = (float(ET.fromstring(heat_map([[Estimate(1.0)] * 3], rows=[name * 24],
                                                 columns=["a", "b", "c"])).attrib["width"])
                    for name in "aW")  # fmt: skip
    assert wide - narrow == pytest.approx(24 * (11.0 - 6.2), abs=1)


def test_every_text_lies_within_its_chart() -> None:
    names = [f"head_{i} eagle K=5" for i in range(MAX_SERIES)]
    points = (Estimate(0.5, 0.4, 0.6),) * 4
    for markup in (
        interval_chart([Series(n, points) for n in names],
                       axes=Axes("domain", "tokens per round", ("arith", "stdlib_code") * 2)),
        heat_map([[Estimate(2.0, 1.0, 3.0)] * 3] * 2, rows=names[:2], columns=names[:3]),
        stacked_bars([[1.0, 2.0, 3.0, 0.5]] * 3, rows=names[:3], parts=names[:4], unit="ms"),
        stacked_bars([[1.0, 2.0]] * 2, rows=["x" * 48] * 2, parts=names[:2], unit="ms"),
        interval_chart([Series("x" * 48, points)], axes=Axes("domain", "y", ("a",) * 4)),
    ):  # fmt: skip
        root = ET.fromstring(markup)
        width, height = float(root.attrib["width"]), float(root.attrib["height"])
        for text in root.iter("text"):
            size = 6.2 * len(text.text or "")
            x, y = float(text.attrib["x"]), float(text.attrib["y"])
            left = x - size * {"start": 0.0, "middle": 0.5, "end": 1.0}[text.attrib["text-anchor"]]
            assert -2 <= left <= width - size + 2, text.text
            assert 8 <= y <= height, text.text


def luminance(colour: str) -> float:
    """Of WCAG 2.2; `colour` is #rgb or #rrggbb."""
    digits = colour[1:] if len(colour) == 7 else "".join(2 * c for c in colour[1:])
    parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_colours_stand_out_from_the_page(scheme: int) -> None:
    """WCAG: 4.5 for text, 3 for graphics; numbers inside bars are page-coloured on the series."""
    found = re.findall(r"--(\w+):(#[0-9a-f]{3,6})\b", STYLE.split("@media")[scheme])
    colours = dict(found)
    for text in ("ink", "soft"):
        assert contrast(colours[text], colours["page"]) >= 4.5, text
    for number in range(MAX_SERIES):
        assert contrast(colours[f"s{number}"], colours["page"]) >= 4.5, number


# Vienot, Brettel and Mollon 1999: linear RGB as seen without long or medium cones.
PROTAN = ((0.11238, 0.88762, 0.0), (0.11238, 0.88762, 0.0), (0.00401, -0.00401, 1.0))
DEUTAN = ((0.29275, 0.70725, 0.0), (0.29275, 0.70725, 0.0), (-0.02234, 0.02234, 1.0))


@pytest.mark.parametrize("eye", [PROTAN, DEUTAN], ids=["protan", "deutan"])
@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_series_differ_by_marker_or_by_colour_without_red_or_green_cones(
    scheme: int, eye: tuple[tuple[float, ...], ...]
) -> None:
    """Series i and i + 4 have the same marker, so their colours alone must tell them apart."""
    colours = dict(re.findall(r"--(s\d):(#[0-9a-f]{3,6})\b", STYLE.split("@media")[scheme]))
    for number in range(4):
        seen = []
        for name in (f"s{number}", f"s{number + 4}"):
            digits = colours[name][1:]
            digits = digits if len(digits) == 6 else "".join(2 * c for c in digits)
            rgb = [(int(digits[i : i + 2], 16) / 255) ** 2.2 for i in (0, 2, 4)]
            seen.append([sum(a * b for a, b in zip(row, rgb, strict=True)) for row in eye])
        gap = max(abs(max(a, 0) ** 0.45 - max(b, 0) ** 0.45) for a, b in zip(*seen, strict=True))
        assert gap > 0.15, f"s{number} and s{number + 4} look alike"


def test_bars_share_one_scale() -> None:
    markup = stacked_bars([[1.0, 1.0], [0.0, 1.0]], rows=["a", "b"], parts=["p", "q"], unit="s")
    rects = [e.attrib for e in ET.fromstring(markup).iter("rect")]
    widths = [float(box["width"]) for box in rects if box["height"] == "20.0"]
    assert widths == [pytest.approx(widths[0])] * 2 + [0.0, pytest.approx(widths[0])]


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.0404, "0.0404"), (2.7, "2.70"), (25.0, "25.0"), (1234.4, "1234"), (0.0, "0")],
)
def test_numbers_of_bars_have_three_digits_and_no_exponent(value: float, shown: str) -> None:
    assert three_digits(value) == shown


def test_standalone_file_is_xml_with_its_colours() -> None:
    chart = interval_chart([CURVE], axes=Axes("position", "p_i", ("1", "2")))
    root = ET.fromstring(standalone(chart, description="n = 3 <prompts>"))
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert root[0].text == "n = 3 <prompts>"
    assert "--s0" in (root[1].text or "")


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0.0, 1.0, [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]), (1.0, 1.1, 1.1), (0.0, 731.0, 800.0)],
    ids=["rates", "narrow", "speeds"],
)
def test_ticks_are_few_and_cover_the_range(low: float, high: float, expected: object) -> None:
    ticks = ticks_over(low, high)
    assert ticks[0] == low
    assert 3 <= len(ticks) <= 7
    assert (ticks if isinstance(expected, list) else ticks[-1]) == pytest.approx(expected)


def test_ticks_of_large_numbers_are_thousands_and_fit() -> None:
    points = Series("a", (Estimate(98_307.0), Estimate(163_064.0)))
    root = ET.fromstring(interval_chart([points], axes=Axes("x", "y", ("1", "2")), floor=0.0))
    texts = [e.text or "" for e in root.iter("text")]
    assert {"0", "50k", "100k", "150k", "200k"} <= set(texts)
    assert max(map(len, texts)) <= 5


@pytest.mark.parametrize(("low", "high"), [(-0.15, 0.05), (-0.05, 0.3), (-1.0, 2.0)])
def test_scale_that_begins_below_zero_shows_zero_as_a_line(low: float, high: float) -> None:
    """-0.15 + 3 * 0.05 is 2.8e-17, and from -0.05 steps of 0.1 pass 0 by."""
    ticks = ticks_over(low, high)
    assert 0.0 in ticks
    assert ticks[0] <= low
    assert ticks[-1] >= high
    points = Series("a", (Estimate(low), Estimate(high)))
    root = ET.fromstring(interval_chart([points], axes=Axes("x", "y", ("1", "2")), floor=low))
    assert [e.attrib.get("class") for e in root.iter("line")].count("zero") == 1
    assert max(len(e.text or "") for e in root.iter("text")) <= 5
