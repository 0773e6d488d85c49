"""One HTML file with the figures and tables of some sections; it loads nothing from anywhere.

Every string that comes from a results file goes through `clean`: control characters removed,
length bounded, HTML escaped. The page adapts from 1280 to 400 pixels by CSS alone: where a
table has no room, intervals move below their values, then it scrolls inside its own box beside its
first column; on paper it wraps. Charts are inline SVG.
`tools/screenshot_report.py` measures a page in a browser.
"""

import html
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence

from mtp_research.evaluation.figures import Figure, Missing
from mtp_research.evaluation.sections import Section
from mtp_research.evaluation.stats.outcome import PromptEntry
from mtp_research.evaluation.svg_parts import STYLE
from mtp_research.evaluation.tables import UNDEFINED, Grid

MAX_CHARACTERS = 400  # of a string from a file
MAX_FACT = 4000  # of a command, which is to be typed again
MAX_NOTE = 1000
MAX_LISTED_PROMPTS = 300
_LONG_NAME = 16  # characters, from which on a row's name keeps more room on a phone
_CLASS_WORDS, _CLASS_LONG = ' class="words"', ' class="long"'
# The browser itself refuses whatever would leave the page.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_PAGE_STYLE = """
*{box-sizing:border-box}
body{margin:0 auto;max-width:1180px;padding:24px 16px 48px;background:var(--page);color:var(--ink);
font:15px/1.5 system-ui,sans-serif}
h1{font-size:1.6rem;line-height:1.2;margin:0 0 .2em}
h2{font-size:1.2rem;margin:2.2em 0 .6em;padding-top:.7em;border-top:2px solid var(--ink)}
h1,h2,p,li,dt,dd,summary,figcaption{overflow-wrap:anywhere}
.contents{columns:3 240px;column-gap:40px;font-size:13px;margin:.6em 0}a{color:var(--s0)}
h1,h2{font-weight:600}.soft,.own,dt{color:var(--soft)}p{margin:.5em 0;max-width:78ch}
.warning{border-left:4px solid var(--s1);padding:.3em .8em;margin:.6em 0}
.figures,.tables{display:grid;gap:28px 32px;align-items:start;margin:1.4em 0}
.figures{grid-template-columns:repeat(auto-fill,minmax(min(100%,340px),1fr))}
.tables{display:flex;flex-wrap:wrap}.tables figure{max-width:100%;min-width:min(100%,320px)}
figure{margin:0;min-width:0}
figcaption,.caption{font-size:13px;line-height:1.4}figcaption{margin-top:6px}
.caption{margin:0 0 6px;contain:inline-size}.own{display:block}
.scroll{overflow-x:auto;max-width:100%;background-repeat:no-repeat;
background-image:linear-gradient(90deg,var(--page) 40%,#0000),linear-gradient(-90deg,var(--page)
40%,#0000),linear-gradient(90deg,var(--shade),#0000),linear-gradient(-90deg,var(--shade),#0000);
background-position:0 0,100% 0,0 0,100% 0;background-size:36px 100%,36px 100%,14px 100%,14px 100%;
background-attachment:local,local,scroll,scroll}
.chart{display:block;width:100%;max-width:440px;height:auto}
.chart.natural{width:auto;max-width:none}
table{border-collapse:collapse;font-size:13px;font-variant-numeric:tabular-nums;
border-bottom:1.5px solid var(--ink)}
thead th{font-weight:600;border-top:1.5px solid var(--ink);border-bottom:1px solid var(--ink)}
th,td{padding:2px 8px;text-align:right;white-space:nowrap;vertical-align:top}
thead th{white-space:normal;vertical-align:bottom}.with{white-space:normal}
.with span{white-space:nowrap}
.words,th:first-child{text-align:left}th:first-child{padding-left:2px}
tbody th{font-weight:400;white-space:pre-wrap}tbody tr:nth-child(even){background:var(--band)}
@media screen and (max-width:640px){th,td{padding:2px 6px}.long th:first-child{min-width:9.6em}
th:first-child{position:sticky;left:0;background:var(--page)}
th:first-child::after{content:"";position:absolute;right:0;top:0;bottom:0;border-right:1px solid
var(--rule)}tbody tr:nth-child(even) th{
background:linear-gradient(var(--band),var(--band)),var(--page)}}
dl{columns:2 360px;column-gap:40px;margin:.8em 0;font-size:13px}dd{margin:0}
.fact{display:grid;grid-template-columns:88px minmax(0,1fr);gap:12px;break-inside:avoid}
code{font:12px ui-monospace,monospace}ul{padding-left:1.2em;margin:.4em 0}
.left-out{font-size:13px;color:var(--soft);margin:.1em 0;max-width:none}
details{font-size:13px;margin:1em 0}
@media print{body{max-width:none;padding:0;font-size:10pt}table{font-size:8pt}
.scroll{overflow:visible;background:none}
th,td,.with span{white-space:normal}th,td{padding:2px 4px}tbody th{white-space:pre-wrap}
.words,tbody th{overflow-wrap:anywhere}figure,table,.warning{break-inside:avoid}
h2{break-after:avoid}.figures{grid-template-columns:1fr 1fr}.tables{grid-template-columns:1fr}
details:not([open]){display:none}}
"""


def render_page(sections: Sequence[Section], *, title: str = "Acceptance report") -> str:
    """The whole page; see the module docstring."""
    names = ", ".join(section.title for section in sections)
    figures, tables = itertools.count(1), itertools.count(1)
    body = [f"<h1>{clean(title)}</h1>"]
    if len(sections) > 1:
        body.append(_contents(sections))
    for section in sections:
        inside = "\n".join(_section(section, figures, tables))
        body.append(f'<section id="{clean(section.name)}">{inside}</section>')
    notes = list(dict.fromkeys(note for section in sections for note in section.notes))
    body.append("<h2>How the numbers are defined</h2>")
    body.append(f"<ul>{''.join(f'<li>{_prose(note)}</li>' for note in notes)}</ul>")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{clean(title)}: {clean(names)}</title>"
        f"<style>{STYLE}{_PAGE_STYLE}</style></head>\n<body>\n"
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def clean(text: object, *, limit: int = MAX_CHARACTERS) -> str:
    """Text from a file as HTML: no control characters, at most `limit` characters, escaped."""
    raw = str(text)
    shown = "".join(c for c in raw[: 2 * limit] if c.isprintable())
    is_long = len(raw) > 2 * limit or len(shown) > limit
    return html.escape(f"{shown[: limit - 3]}..." if is_long else shown)


def _contents(sections: Sequence[Section]) -> str:
    """Links to the sections, which stay on the page."""
    items = (
        f'<li><a href="#{clean(section.name)}">{clean(section.title)}</a></li>'
        for section in sections
    )
    return f'<nav aria-label="Contents"><ul class="contents">{"".join(items)}</ul></nav>'


def _section(section: Section, figures: Iterator[int], tables: Iterator[int]) -> Iterable[str]:
    yield f"<h2>{clean(section.title)}</h2>"
    for text in section.warnings:
        yield f'<p class="warning" role="note">{clean(text, limit=MAX_NOTE)}</p>'
    facts = (
        f'<div class="fact"><dt>{clean(name)}</dt><dd>{clean(value, limit=MAX_FACT)}</dd></div>'
        for name, value in section.facts.items()
    )
    yield f"<dl>{''.join(facts)}</dl>"
    drawn = [_figure(figure, next(figures), section.caption) for figure in section.charts]
    yield f'<div class="figures">{"".join(drawn)}</div>'
    yield _left_out([one for one in section.figures if isinstance(one, Missing)])
    shown = [_table(grid, f"Table {next(tables)}. ") for grid in section.grids]
    yield f'<div class="tables">{"".join(shown)}</div>'
    if section.prompts:
        yield _prompts(section.prompts)


def _figure(figure: Figure, number: int, caption: str) -> str:
    own = f" {_prose(figure.note)}" if figure.note else ""
    is_said = not caption or caption in figure.note
    shared = "" if is_said else f'<span class="own">{_prose(caption)}</span>'
    return (
        f'<figure><div class="scroll">{figure.markup}</div><figcaption><b>Figure {number}. '
        f"{_prose(figure.title)}.</b>{own}{shared}</figcaption></figure>"
    )


def _prose(text: str) -> str:
    """A caption or note in which no line begins with a unit or ends within `K = 0` or at `*`."""
    shown = re.sub(r" (?=%|MiB\b)|(?<=\*) ", "\u00a0", clean(text, limit=MAX_NOTE))
    return re.sub(r"\b([A-Za-z]) = (?=\d)", "\\1\u00a0=\u00a0", shown)


def _left_out(missing: Sequence[Missing]) -> str:
    """One line on every figure that could not be drawn."""
    return "".join(
        f'<p class="left-out">Left out: {clean(one.title)}, because {clean(one.reason)}.</p>'
        for one in missing
    )


def _table(grid: Grid, prefix: str = "") -> str:
    words = [_is_words([row[i] for row in grid.rows]) for i in range(len(grid.header))]
    head = "".join(
        f'<th scope="col"{_CLASS_WORDS * is_words}>{_prose(cell)}</th>'
        for cell, is_words in zip(grid.header, words, strict=True)
    )
    rows = "".join(
        f'<tr><th scope="row">{clean(row[0]).replace("/", "/<wbr>")}</th>'
        + "".join(map(_cell, row[1:], words[1:]))
        + "</tr>"
        for row in grid.rows
    )
    title, rest = _parted(grid.title)
    is_long = any(len(row[0]) > _LONG_NAME for row in grid.rows)
    return (
        f'<figure><p class="caption"><b>{prefix}{_prose(title)}{"" if rest else "."}</b>'
        f"{_prose(rest)}{'.' if rest else ''}</p>"
        f'<div class="scroll" tabindex="0" role="region" aria-label="{clean(prefix + title)}">'
        f"<table{_CLASS_LONG * is_long}><thead><tr>{head}</tr></thead>"
        f"<tbody>{rows}</tbody></table></div></figure>"
    )


def _parted(title: str) -> tuple[str, str]:
    """A table's title, and the settings that follow it in parentheses, if any."""
    name, _, settings = title.partition(" (")
    return (name, f" ({settings}") if settings.endswith(")") and ", " in settings else (title, "")


def _cell(text: str, is_words: bool) -> str:
    """A cell; an interval is a part of its own, which a narrow table puts below the value."""
    value, _, between = text.partition(" [")
    if between:
        return f'<td class="with">{clean(value)} <span>{clean(f"[{between}")}</span></td>'
    return f"<td{_CLASS_WORDS * is_words}>{clean(text)}</td>"


def _is_words(cells: Sequence[str]) -> bool:
    """Whether a column holds names, which stand at its left; numbers stand at its right."""
    known = [cell for cell in cells if cell not in ("", UNDEFINED)]
    return bool(known) and not any(re.match(r"[-+]?\d", cell) for cell in known)


def _prompts(prompts: Sequence[PromptEntry]) -> str:
    """Ids and hashes of the prompts; a results file holds no text of theirs."""
    listed = prompts[:MAX_LISTED_PROMPTS]
    rows = [(p.question_id, p.category, p.format, p.sha256[:16]) for p in listed]
    more = len(prompts) - len(listed)
    title = f"Prompts ({len(prompts)}{f', {more} not listed' * (more > 0)})"
    grid = Grid("sha256 is of format and text", ("id", "category", "format", "sha256"), tuple(rows))
    return f"<details><summary>{title}</summary>{_table(grid)}</details>"
