"""Speed by batch size and K against plain decoding, one table a head and policy.

Parts of a sweep, which have prompts of their own, meet here: every line is divided by K = 0 at the
same batch size in the same run, over the same prompts. Letters: K drafts per step, R requests
decoded at a time.
"""

from collections.abc import Iterator, Sequence

from mtp_research.evaluation.entries import Entry, Setting, drafting
from mtp_research.evaluation.policy_matrix import describe
from mtp_research.evaluation.stats.bootstrap import Estimate
from mtp_research.evaluation.stats.speed import MAX_DRIFT, decode_rate, divide, full_rate
from mtp_research.evaluation.tables import UNDEFINED, Grid, number, printable

RATIO_NOTE = (
    "Speed by batch size and K: tokens per second are the median [slowest, fastest pass]; a ratio "
    "is that of the medians [slowest pass over the fastest of K = 0, fastest over its slowest], "
    "K = 0 in the same run at the same batch size. End to end counts the steps with prompt rows, "
    "decode only does not."
)
_NOTHING = Estimate(None)
_MANY = 2  # lines, from which on a table says more than that of its run
_HEADER = (
    "batch", "K", "prompts", "end to end [tokens/s]", "K = 0, end to end [tokens/s]",
    "ratio, end to end", "decode only [tokens/s]", "K = 0, decode only [tokens/s]",
    "ratio, decode only", "drift of K = 0", "lossless", "run",
)  # fmt: skip
_FULL_HEADER = (
    "batch", "K", "prompts", "batch full [tokens/s]", "K = 0, batch full [tokens/s]",
    "ratio, batch full", "run",
)  # fmt: skip


def batch_grids(found: Sequence[Entry]) -> list[Grid]:
    """Tables for each head and policy that ran at several batch sizes or K; see `RATIO_NOTE`.

    Speeds of steps with every place taken have a table of their own, where there are any: beside
    the others they would not fit into 1280 pixels.
    """
    groups: dict[tuple[Setting, str], list[Entry]] = {}
    for entry in drafting(found):
        shared = entry.setting._replace(
            num_speculative_tokens=0, batch_size="", num_prompts=0, prompts_sha256=""
        )
        groups.setdefault((shared, entry.series_name), []).append(entry)
    return [
        grid
        for (setting, name), members in groups.items()
        if len({_place(entry) for entry in members}) >= _MANY
        and any(entry.baseline for entry in members)
        for grid in _grids(setting, name, sorted(members, key=_place))
    ]


def ratio_of(entry: Entry) -> Estimate:
    """End-to-end speed over that of K = 0 in the same run, with its least and most."""
    plain = entry.baseline
    return Estimate(None) if plain is None else _ratio(entry.tokens_per_s, plain.tokens_per_s)


def drift_warnings(found: Sequence[Entry]) -> list[str]:
    """A line on the runs whose plain decoding changed its speed between the passes."""
    drifts: dict[str, float] = {}
    for entry in found:
        drift, name = entry.summary.speed.drift, entry.run.name
        if drift is not None and abs(drift) > max(MAX_DRIFT, abs(drifts.get(name, 0.0))):
            drifts[name] = drift
    if not drifts:
        return []
    listed = ", ".join(f"{printable(name)} ({drift:+.1%})" for name, drift in drifts.items())
    return [
        f"warning: K = 0 drifted by more than {MAX_DRIFT:.0%} between the halves of its passes in "
        f"{listed}: no speed and no ratio of these runs can be relied on"
    ]


def _grids(setting: Setting, name: str, members: Sequence[Entry]) -> Iterator[Grid]:
    shared, title = describe(setting, without="batch_size"), "Speed by batch size and K"
    yield Grid(f"{title}, {name} ({shared})", _HEADER, tuple(map(_cells, members)))
    rows = tuple(map(_full_cells, members))
    if any(cell != UNDEFINED for row in rows for cell in row[3:5]):
        yield Grid(f"{title}, batch full, {name} ({shared})", _FULL_HEADER, rows)


def _place(entry: Entry) -> tuple[float, str, int]:
    """Order of a line: batch size as a number where it is one, then K."""
    size = entry.setting.batch_size
    return (float(size) if size.isdigit() else 0.0, size, entry.summary.num_speculative_tokens)


def _cells(entry: Entry) -> tuple[str, ...]:
    plain, summary = entry.baseline, entry.summary
    ends, decodes = entry.tokens_per_s, decode_rate(summary.speed)
    plain_ends = _NOTHING if plain is None else plain.tokens_per_s
    plain_decodes = _NOTHING if plain is None else decode_rate(plain.summary.speed)
    return (
        *_place_cells(entry),
        _spread(ends, ".1f"),
        _spread(plain_ends, ".1f"),
        _spread(_ratio(ends, plain_ends), ".3f"),
        _spread(decodes, ".1f"),
        _spread(plain_decodes, ".1f"),
        _spread(_ratio(decodes, plain_decodes), ".3f"),
        UNDEFINED if plain is None else number(plain.summary.speed.drift, "+.1%"),
        printable(summary.lossless),
        printable(entry.run.name),
    )


def _full_cells(entry: Entry) -> tuple[str, ...]:
    plain, ours = entry.baseline, full_rate(entry.summary.speed)
    theirs = _NOTHING if plain is None else full_rate(plain.summary.speed)
    return (
        *_place_cells(entry),
        _spread(ours, ".1f"),
        _spread(theirs, ".1f"),
        _spread(_ratio(ours, theirs), ".3f"),
        printable(entry.run.name),
    )


def _place_cells(entry: Entry) -> tuple[str, str, str]:
    """Batch size, K and prompts."""
    setting = entry.setting
    drafts = str(entry.summary.num_speculative_tokens)
    return printable(setting.batch_size), drafts, str(setting.num_prompts)


def _ratio(ours: Estimate, plain: Estimate) -> Estimate:
    return Estimate(
        divide(ours.value, plain.value), divide(ours.low, plain.high), divide(ours.high, plain.low)
    )


def _spread(figure: Estimate, form: str) -> str:
    """`value [least, most]`; the value alone where there was one pass."""
    if figure.low is None or figure.low == figure.high:
        return number(figure.value, form)
    return f"{number(figure.value, form)} [{figure.low:{form}}, {number(figure.high, form)}]"
