"""One HTML file with the figures and tables of some runs; it loads nothing from anywhere.

Every string that comes from a results file goes through `clean`: control characters removed,
length bounded, HTML escaped. The page adapts from 1280 to 400 pixels by CSS alone; a wide table
scrolls inside its own box. Charts are inline SVG.
"""

import html
from collections.abc import Iterable, Mapping, Sequence

from mtp_research.evaluation.figures import Figure, run_figures, shared_figures
from mtp_research.evaluation.policy_matrix import policy_matrices
from mtp_research.evaluation.report import Report, note_paragraphs
from mtp_research.evaluation.report_tables import overview_grid, run_grids
from mtp_research.evaluation.runs import Run, entries, mapping
from mtp_research.evaluation.svg import STYLE
from mtp_research.evaluation.tables import Grid

MAX_CHARACTERS = 400  # of a string from a file
MAX_LISTED_PROMPTS = 300
# The browser itself refuses whatever would leave the page.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_PAGE_STYLE = """
*{box-sizing:border-box}body{margin:0 auto;max-width:1280px;padding:16px;background:var(--page);
color:var(--ink);font:15px/1.45 system-ui,sans-serif}
h1{font-size:1.5rem;margin:.2em 0}h2{font-size:1.2rem;margin:1.6em 0 .4em;padding-top:.6em;
border-top:1px solid var(--rule)}h1,h2,h3,p,li,dd,summary{overflow-wrap:anywhere}
h3{font-size:.95rem;margin:1.2em 0 .4em}.soft,figcaption small,dt{color:var(--soft)}
.warning{border-left:4px solid var(--s1);padding:.3em .8em;margin:.5em 0}
.figures{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,330px),1fr));gap:20px}
figure{margin:0;min-width:0}figcaption{font-weight:600;margin-bottom:6px}
figcaption small{display:block;font-weight:400}.scroll{overflow-x:auto;max-width:100%}
.chart{display:block;max-width:100%;height:auto}.chart.natural{max-width:none}
table{border-collapse:collapse;font-size:13px;font-variant-numeric:tabular-nums}
th,td{padding:3px 10px;text-align:right;white-space:nowrap;border-bottom:1px solid var(--rule)}
th:first-child,td:first-child{text-align:left}tbody th{font-weight:400;white-space:pre}
dl{display:grid;grid-template-columns:minmax(90px,max-content) minmax(0,1fr);gap:2px 14px;margin:0}
dd{margin:0}code{font-size:12px}
"""


def render_page(runs: Sequence[Run]) -> str:
    """The whole page; see the module docstring."""
    found = entries(runs)
    titles = ", ".join(run.name for run in runs)
    body = [f"<h1>Acceptance report</h1><p class=soft>{clean(titles)}</p>"]
    if len(runs) > 1:
        body += ["<h2>All runs</h2>", _figures(shared_figures(found)), _table(overview_grid(found))]
        body += [_table(matrix.grid) for matrix in policy_matrices(found)]
        body.append(
            "<p class=soft>Runs are compared only where prompts, K, dtype, temperature, "
            "verification rule and batch size agree.</p>"
        )
    for run in runs:
        body += _run_section(run)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>Acceptance report: {clean(titles)}</title>"
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


def _run_section(run: Run) -> Iterable[str]:
    report = run.report
    paragraphs = note_paragraphs(report)
    is_warning = [text.startswith(("warning:", "skipped:")) for text in paragraphs]
    warnings = [text for text, bad in zip(paragraphs, is_warning, strict=True) if bad]
    notes = [text for text, bad in zip(paragraphs, is_warning, strict=True) if not bad]
    yield f"<h2>{clean(run.name)}: {clean(run.head_label)}</h2>"
    for text in warnings:
        yield f'<p class="warning" role="note">{clean(text, limit=1000)}</p>'
    yield _facts(run)
    yield _figures(run_figures(report))
    for grid in run_grids(report):
        yield _table(grid)
    yield "".join(f"<p class=soft>{clean(text, limit=1000)}</p>" for text in notes)
    yield _prompts(report)


def _facts(run: Run) -> str:
    """How the run was made, from its record and configuration."""
    record, config = run.report.run, run.report.config
    git, versions, hardware = (mapping(record, k) for k in ("git", "versions", "hardware"))
    gpus = hardware.get("gpus")
    state = " with uncommitted changes" if git.get("dirty") else ""
    facts = {
        "command": record.get("command"),
        "started": record.get("started_at"),
        "code": f"{str(git.get('sha'))[:12]}{state}" if git else None,
        "target": mapping(config, "model").get("path"),
        "head": mapping(config, "spec").get("head"),
        "verification": mapping(config, "spec").get("verify"),
        "sampling": _pairs(mapping(config, "sampling"), ("temperature", "top_p", "max_new_tokens")),
        "batch": run.batch_size,
        "dtype, seed": f"{run.report.dtype}, {run.report.seed}",
        "machine": ", ".join(map(str, gpus)) if isinstance(gpus, list) and gpus
        else hardware.get("cpu"),
        "versions": _pairs(versions, ("python", "torch", "triton", "transformers")),
    }  # fmt: skip
    rows = (f"<dt>{k}</dt><dd>{clean(v)}</dd>" for k, v in facts.items() if v not in (None, ""))
    return f"<dl>{''.join(rows)}</dl>"


def _pairs(values: Mapping[str, object], names: Iterable[str]) -> str:
    return ", ".join(f"{name} {values[name]}" for name in names if name in values)


def _figures(figures: Sequence[Figure]) -> str:
    if not figures:
        return ""
    return f'<div class="figures">{"".join(map(_figure, figures))}</div>'


def _figure(figure: Figure) -> str:
    note = f"<small>{clean(figure.note)}</small>" if figure.note else ""
    caption = f"<figcaption>{clean(figure.title)}{note}</figcaption>"
    return f'<figure>{caption}<div class="scroll">{figure.markup}</div></figure>'


def _table(grid: Grid) -> str:
    head = "".join(f'<th scope="col">{clean(cell)}</th>' for cell in grid.header)
    rows = "".join(
        f'<tr><th scope="row">{clean(row[0])}</th>'
        + "".join(f"<td>{clean(cell)}</td>" for cell in row[1:])
        + "</tr>"
        for row in grid.rows
    )
    return (
        f'<h3>{clean(grid.title)}</h3><div class="scroll" tabindex="0"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _prompts(report: Report) -> str:
    """Ids and hashes of the prompts; a results file holds no text of theirs."""
    listed = report.prompts[:MAX_LISTED_PROMPTS]
    rows = [(p.question_id, p.category, p.format, p.sha256[:16]) for p in listed]
    more = len(report.prompts) - len(listed)
    title = f"Prompts ({len(report.prompts)}{f', {more} not listed' * (more > 0)})"
    grid = Grid("sha256 is of format and text", ("id", "category", "format", "sha256"), tuple(rows))
    return f"<details><summary>{title}</summary>{_table(grid)}</details>"
