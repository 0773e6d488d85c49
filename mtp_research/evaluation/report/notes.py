"""What a reader of an evaluation has to know: the answer, warnings, definitions, letters, names.

Printed under the tables and shown on the page. The full story is in docs/policies.md and
docs/metrics.md. Letter: K drafts per step.
"""

from collections.abc import Iterator, Mapping, Sequence

from mtp_research.evaluation.report.stored import (
    Report,
    has_engines,
    longest,
    printable,
    ranked,
    rule_of,
)
from mtp_research.evaluation.stats.agreement import LAST_ROUND_NOTE
from mtp_research.evaluation.stats.bootstrap import LEVEL, NUM_DRAWS, Estimate
from mtp_research.evaluation.stats.speed import MAX_DRIFT
from mtp_research.evaluation.stats.statistics import ACCEPTED_WARNING, FORMULAS

UNDEFINED = "-"  # a figure that there is not
WARNINGS = ("warning:", "skipped:", "weights:")  # how a paragraph begins that must not be missed
_MAX_SENTENCE = 400  # characters
_NUM_LISTED = 5  # skipped prompts
_MAX_LINE = 200  # characters of a line from a run record
LETTERS = (
    "Letters: K = drafts per step, N = MTP modules of the heads, R = batch = requests decoded at a "
    "time, T = sampling temperature, n = number of prompts, r = rejected drafts of a round; a "
    "round is one verification of a request's drafts."
)
RATES = (
    f"acceptance rate, rate = {FORMULAS['acceptance_rate']}; baseline, K = 0 = plain decoding of "
    "the same run; ratio, to baseline = tokens/s over those of the baseline."
)
RATIO_NOTE = (
    "Speed by batch size and K: tokens per second are the median [slowest, fastest pass]; a ratio "
    "is that of the medians [slowest pass over the fastest of K = 0, fastest over its slowest], "
    "K = 0 in the same run at the same batch size. End to end counts the steps with prompt rows, "
    "decode only does not."
)
HEAD_WORDS = (
    "Heads are named by what depth m of their training read: chain = the output of depth m-1 at "
    "the same row; ttt (one module) and shared_context (N modules) = the target's history, then "
    "draft rows; mixed = as chain, or the output of an earlier depth; independent = the target's "
    "hidden vector with the token shifted. pre_norm, post_norm = whether the hidden vector that "
    "one module hands to the next is taken before or after the final norm."
)
POLICY_WORDS = (
    "Decode policies, by the rows of the draft passes: eagle = the target's hidden vectors in "
    "every module's history, draft rows above it; training = each pass reads the output of the "
    "pass before at the same row, and the last K + 1 rows run again; eagle_norefresh = as eagle, "
    "but only the first pass runs the newly verified rows; training_norefresh = as training, but "
    "newly verified rows alone; window = the target's hidden vector of the row just before the "
    "token, or a drafted one beyond the verified text, last K rows; target_roll = the target's "
    "hidden vector at the row itself, newly verified rows alone; target_roll_rerun = the same with "
    "the last K + 1 rows run again."
)
FAULT_WORDS = (
    "Slots of the draft KV, against a recompute over the text alone: WRONG = the row consumed a "
    "token that is not in the text; MIXED = right token, but a draft-made hidden vector although "
    "the target's own is known; HOLE = never written; PROVISIONAL = depends on tokens that are not "
    "decided yet, no fault."
)


def headline(report: Report) -> str:
    """The answer in one sentence, without its full stop; empty without drafts.

    The condition of the largest paired difference, else that of the longest acceptance; rules that
    make fewer drafts count where no condition always makes K.
    """
    labels = {one.result.label for one in ranked(report)}
    pairs = [
        (abs(length.value), pair.condition, pair.reference, length)
        for pair in report.paired
        if pair.condition in labels
        and (length := pair.differences["acceptance_length_micro"]).value is not None
    ]
    if pairs:
        _, label, reference, difference = max(pairs)
        best = next(one for one in report.summaries if one.result.label == label)
    elif (best := longest(report)) is None:
        return ""
    one, length = best.result, interval(best.acceptance.acceptance_length_micro)
    answer = f"{one.label}: {length} tokens a round"
    if pairs:
        answer += f", {interval(difference, '+.3f')} over {reference}"
    answer += f" at K = {one.num_speculative_tokens}"
    if len(pairs) > 1:
        answer += f", the largest of {len(pairs)} differences"
    elif not pairs and (ratio := best.speed.ratio_end_to_end) is not None:
        answer += f", {number(ratio, '.3f')} times the tokens/s of K = 0"
    is_count = one.lossless.startswith(("identical", "DIFFERS"))
    verdict = f"; {'texts ' * is_count}{one.lossless}" if one.lossless else ""
    return printable(f"{answer}{verdict}", limit=_MAX_SENTENCE)


def interval(figure: Estimate, form: str = ".3f") -> str:
    """`value [low, high]`, the value alone where it has no interval, or a dash."""
    if figure.low is None or figure.high is None:
        return number(figure.value, form)
    return f"{figure.value:{form}} [{figure.low:{form}}, {figure.high:{form}}]"


def number(value: float | None, form: str, *, scale: float = 1.0) -> str:
    """`value * scale`, or a dash."""
    return UNDEFINED if value is None else f"{value * scale:{form}}"


def note_paragraphs(report: Report) -> list[str]:
    """What a reader of the tables has to know: warnings first, then how figures are defined."""
    paragraphs = _paragraphs(report)
    return sorted(paragraphs, key=lambda text: not text.startswith(WARNINGS))  # in their order


def _paragraphs(report: Report) -> list[str]:
    warnings = [w for summary in report.summaries for w in summary.acceptance.warnings]
    left_out = report.run.get("skipped_conditions")
    lines = left_out if isinstance(left_out, list | tuple) else ()
    return [
        *_skipped_note(report),
        *_turn_notes(report),
        *(f"skipped: {printable(str(line), limit=_MAX_LINE)}" for line in lines),
        *(f"warning: {warning}" for warning in dict.fromkeys(warnings)),
        *_draft_length_note(report),
        *_weights_note(report),
        *_training_note(report),
        *(f"heads {name}: {phrase}" for name, phrase in head_conventions(report.run).items()),
        *_timing_notes(report),
        *_engine_notes(report),
        f"acceptance length (micro) = {FORMULAS['acceptance_length_micro']}",
        f"acceptance length (macro) = {FORMULAS['acceptance_length_macro']}",
        f"[low, high] = {100 * LEVEL:.0f} % cluster bootstrap over prompts, {NUM_DRAWS} draws, "
        f"seed {report.seed}; r = rejected drafts of a round",
        ACCEPTED_WARNING,
    ]


def head_conventions(record: Mapping[str, object]) -> dict[str, str]:
    """Conventions of the heads of a run by name; none in files from before they were recorded.

    The names are those of the conditions, which tell `a/head` from `b/head`.
    """
    heads = record.get("heads")
    return {
        printable(str(name)): printable(str(facts["conventions"]), limit=_MAX_LINE)
        for name, facts in (heads.items() if isinstance(heads, Mapping) else ())
        if isinstance(facts, Mapping) and facts.get("conventions")
    }


def _skipped_note(report: Report) -> Iterator[str]:
    skipped = report.skipped_prompts
    if skipped:
        listed = ", ".join(printable(name) for name in skipped[:_NUM_LISTED])
        yield (
            f"skipped: {len(skipped)} of {len(skipped) + len(report.prompts)} prompts leave no "
            f"room in the context and are in no figure: {listed}"
            f"{', ...' * (len(skipped) > _NUM_LISTED)}"
        )


def _weights_note(report: Report) -> Iterator[str]:
    """Weights that were packed are not the original release's, and neither are their figures."""
    target = report.run.get("target")
    facts = target.get("gguf") if isinstance(target, Mapping) else None
    if isinstance(facts, Mapping):
        types = facts.get("num_tensors_by_type")
        listed = types.items() if isinstance(types, Mapping) else ()
        yield printable(
            f"weights: de-quantised from {facts.get('file')} "
            f"({', '.join(f'{number} tensors {kind}' for kind, number in listed)}), rounded to "
            f"{facts.get('stored_as')}; figures are of this file, not of the original release",
            limit=2 * _MAX_LINE,
        )


def _turn_notes(report: Report) -> Iterator[str]:
    num_asked = [prompt.num_turns for prompt in report.prompts]
    if max(num_asked, default=1) > 1:
        yield (
            f"turns: {sum(num_asked)} of {len(num_asked)} prompts, each with the condition's own "
            "answers before it; a prompt with all its turns is one unit of an interval"
        )
    cut = {c.label: len(c.cut_prompts) for c in report.conditions if c.cut_prompts}
    if cut:
        listed = ", ".join(f"{printable(label)} {number}" for label, number in cut.items())
        yield (
            f"warning: conversations whose next turn did not fit the context, so that it and what "
            f"follows were not asked: {listed}; raise engine.max_model_len"
        )


def _draft_length_note(report: Report) -> Iterator[str]:
    """A step without drafts is no round, which flatters a rule that drafts where it is easy."""
    drafting = (one for one in report.conditions if one.num_speculative_tokens > 0)
    for rule in dict.fromkeys(rule_of(one, report) for one in drafting):
        if rule != "fixed":
            yield (
                f"warning: spec.draft_length={printable(rule)}: steps without drafts are no "
                "rounds; compare such runs by target forwards per token, not by acceptance length"
            )


def _training_note(report: Report) -> Iterator[str]:
    names = report.run.get("heads_in_training")
    for name in names if isinstance(names, list) else ():
        yield (
            f"warning: {printable(str(name))} was still being trained when it was read: evaluate "
            "it again once its run has ended"
        )


def _timing_notes(report: Report) -> Iterator[str]:
    resumed = [
        printable(condition.label)
        for condition in report.conditions
        if condition.first.is_resumed or any(repeat.wall_s is None for repeat in condition.repeats)
    ]
    if resumed:
        has_lost_ratios = any(
            one.num_speculative_tokens == 0 and one.first.wall_s is None
            for one in report.conditions
        )
        yield (
            f"warning: interrupted and resumed: {', '.join(resumed)}; the passes that were "
            "interrupted have no times"
            + "; without those of plain decoding there is no ratio to it"
            * has_lost_ratios
        )
    drifts = {s.result.label: s.speed.drift for s in report.summaries if s.speed.drift is not None}
    for label, drift in drifts.items():
        if abs(drift) > MAX_DRIFT:
            yield (
                f"warning: {printable(label)} drifted by {drift:+.1%} from the first half "
                f"of its passes to the second, more than {MAX_DRIFT:.0%}; measure on a quiet "
                "machine, or with more timing.passes"
            )
    yield from _order_note(report, list(drifts.values()))
    yield from _preparation_notes(report)
    if any(summary.speed.full.value is not None for summary in report.summaries):
        yield (
            "batch full = of the steps without prompt rows (decode only), those that took every "
            "place of the batch; decode only has the tail too, in which requests have ended and "
            "places stay empty: where texts end at different times, it can lie far below"
        )
    if any(summary.cost is not None for summary in report.summaries):
        yield (
            "tau / (1 + K c + v): tau = acceptance length; unit = target + verify of a K = 0 step; "
            "c = one draft pass, v = target + verify beyond the unit; host time is in neither"
        )


def _engine_notes(report: Report) -> Iterator[str]:
    """How engines were compared, and what their own counters say of their step outputs."""
    if not has_engines(report):
        return
    yield (
        "engines: the same token ids in the same order, all requests there when the clock starts, "
        "batch size by the condition; loading and compiling come before; ratio, to baseline = over "
        "K = 0 of the same engine; `lossless` is of texts against our own K = 0; `own as ENGINE` = "
        "our loop with the heads read back from the engine's checkpoint, run by its conventions"
    )
    yield LAST_ROUND_NOTE
    for one in report.conditions:
        counted = one.first.engine_counters
        if counted:
            steps = sum(record.num_target_forwards for record in one.records)
            found, label = counted.get("num_drafts"), printable(one.label)
            kept = counted.get("num_accepted_tokens")
            yield (
                f"{'warning: ' * (found != steps)}{label}: the engine's own counters say {found} "
                f"rounds and {kept} accepted drafts, its step outputs {steps} rounds"
            )


def _preparation_notes(report: Report) -> Iterator[str]:
    """What was compiled and captured before the clocks started, and after."""
    seconds = {
        c.label: c.first.capture_s for c in report.conditions if c.first.capture_s is not None
    }
    if not seconds:
        return
    longest = max(seconds, key=lambda label: seconds[label])
    late = {
        c.label: sum(one.num_late_builds for one in c.passes if one.num_late_builds is not None)
        for c in report.conditions
        if c.first.num_late_builds is not None
    }
    yield (
        f"timing: steps were compiled and captured before the clocks started: "
        f"{sum(seconds.values()):.0f} s in all, at most {seconds[longest]:.0f} s a condition "
        f"({printable(longest)}); {sum(late.values())} compilations and captures later"
    )
    for label, number in late.items():
        if number:
            yield (
                f"warning: {printable(label)} compiled or captured {number} times while its clock "
                "ran, so its times are not those of a warm loop; run it again, or with more "
                "timing.passes"
            )


def _order_note(report: Report, drifts: Sequence[float]) -> Iterator[str]:
    num_passes = max((summary.speed.num_passes for summary in report.summaries), default=1)
    if num_passes == 1:
        yield (
            "timing: one pass, conditions one after the other; no ABBA order and no drift check "
            "(timing.passes=2 has both)"
        )
        return
    warm_ups = [condition.first.num_warm_ups for condition in report.conditions]
    shown = ", ".join(f"{drift:+.1%}" for drift in drifts) or "not measured"
    yield (
        f"timing: {num_passes} passes in ABBA order, tokens/s as median [least, most] of a pass; "
        f"{min(warm_ups)} to {max(warm_ups)} warm-ups until the median step was stable; baseline "
        f"drift from the first half of the passes to the second: {shown}"
    )
