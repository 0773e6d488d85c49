import math
import xml.etree.ElementTree as ET

import pytest

from mtp_research.evaluation import svg
from mtp_research.evaluation.bootstrap import Estimate
from mtp_research.evaluation.svg import Series, heat_map, interval_chart, stacked_bars, standalone

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
    markup = interval_chart([CURVE], x_labels=["1", "2"], y_label="p_i")
    texts = [e.text for e in ET.fromstring(markup).iter("text")]
    assert texts[1:7] == ["0", "0.2", "0.4", "0.6", "0.8", "1"]
    (low, high), (low_2, high_2) = whiskers(markup)
    assert low - high == pytest.approx(0.2 * 170, abs=0.11)  # the axis from 0 to 1 is 170 high
    assert low_2 - low == pytest.approx(0.3 * 170, abs=0.11)
    assert low_2 - high_2 == pytest.approx(0.2 * 170, abs=0.11)


def test_undefined_points_draw_nothing_and_empty_charts_stay_finite() -> None:
    nothing = Series("eagle", (Estimate(None), Estimate(None)))
    markup = interval_chart([nothing], x_labels=["1", "2"], y_label="p_i")
    assert not whiskers(markup)
    assert all(map(math.isfinite, numbers(markup)))
    for empty in (
        interval_chart([], x_labels=[], y_label="p_i"),
        heat_map([], rows=[], columns=[]),
        stacked_bars([], rows=[], parts=["a"], unit="s"),
    ):
        assert all(map(math.isfinite, numbers(empty)))


def test_names_are_escaped_and_bounded() -> None:
    bad = "<script>&\"'" + "\x00" + "x" * 500
    for markup in (
        interval_chart([Series(bad, CURVE.points)], x_labels=[bad, "2"], y_label="p_i"),
        heat_map([[1.0]], rows=[bad], columns=[bad]),
        stacked_bars([[1.0]], rows=[bad], parts=[bad], unit="s"),
    ):
        texts = [e.text or "" for e in ET.fromstring(markup).iter("text")]  # parses: well formed
        assert "<script" not in markup
        assert max(map(len, texts)) <= 24


def test_heat_map_darkens_with_the_value_and_marks_gaps() -> None:
    markup = heat_map([[1.0, 3.0], [2.0, None]], rows=["a", "b"], columns=["x", "y"])
    styles = [e.attrib["style"] for e in ET.fromstring(markup).iter("rect")]
    shades = [float(style.rpartition(":")[2]) for style in styles]
    assert shades == [0.06, 0.56, 0.31, 0.06]
    assert [e.text for e in ET.fromstring(markup).iter("text")].count("-") == 1


def test_bars_share_one_scale() -> None:
    markup = stacked_bars([[1.0, 1.0], [0.0, 1.0]], rows=["a", "b"], parts=["p", "q"], unit="s")
    widths = [float(e.attrib["width"]) for e in ET.fromstring(markup).iter("rect")]
    assert widths == [pytest.approx(widths[0])] * 2 + [0.0, pytest.approx(widths[0])]


def test_standalone_file_is_xml_with_its_colours() -> None:
    chart = interval_chart([CURVE], x_labels=["1", "2"], y_label="p_i")
    root = ET.fromstring(standalone(chart))
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert "--s0" in (root[0].text or "")


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0.0, 1.0, [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]), (1.0, 1.1, 1.1), (0.0, 731.0, 800.0)],
    ids=["rates", "narrow", "speeds"],
)
def test_ticks_are_few_and_cover_the_range(low: float, high: float, expected: object) -> None:
    ticks = svg._ticks(low, high)
    assert ticks[0] == low
    assert 3 <= len(ticks) <= 7
    assert (ticks if isinstance(expected, list) else ticks[-1]) == pytest.approx(expected)
