"""Which conditions of some runs may stand beside each other in one chart or table.

An *entry* is one condition of a run. Two entries are comparable when they agree in the prompts and
in everything but head and policy; `Setting` is what they must agree in. A *sweep* is a set of
conditions that agree in everything of `Setting` but one part, such as the batch size. Conditions
that differ in prompts share charts of speeds alone, and only along the batch size: a sweep in parts
gives small batches few prompts, and every point has plain decoding of its own.
Letters: K drafts per step, N MTP modules, R requests decoded at a time.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal, NamedTuple

from mtp_research.config.schema import OWN, SamplingConfig
from mtp_research.evaluation.report.stored import (
    PromptEntry,
    Report,
    Run,
    mapping,
    printable,
    rule_of,
)
from mtp_research.evaluation.stats.speed import MAX_DRIFT
from mtp_research.evaluation.stats.summary import ConditionSummary, baseline_of
from mtp_research.heads.record import head_name
from mtp_research.policy.fields import MATCHING_POLICY

SweptPart = Literal["batch_size", "num_speculative_tokens", "temperature"]
_DIGITS = 12  # of a target's hash
_MAX_TARGET, _MAX_TEXT = 48, 80  # characters


class Setting(NamedTuple):
    """What two entries must agree in to be compared.

    `target` is a hash, or the model's path in a file that holds none; `machine` is processor and
    GPUs; `text` is what decides the text beside the temperature, such as `64 new tokens`.
    """

    num_speculative_tokens: int
    dtype: str
    num_prompts: int
    prompts_sha256: str
    temperature: str
    verify: str
    draft_sampling: str
    draft_length: str
    batch_size: str
    target: str
    machine: str
    text: str


@dataclass(frozen=True)
class Entry:
    """One condition of a run; the one with K = 0 is a baseline."""

    run: Run
    summary: ConditionSummary
    prompts_sha256: str

    @property
    def setting(self) -> Setting:
        """What it shares with the entries that it can be compared with."""
        report, own = self.run.report, self.summary.result

        def text(known: object, group: str, key: str) -> str:
            return str(mapping(report.config, group).get(key) if known is None else known)

        return Setting(
            own.num_speculative_tokens,
            report.dtype,
            len(report.prompts),
            self.prompts_sha256,
            text(own.temperature, "sampling", "temperature"),
            text(own.verify, "spec", "verify"),
            text(own.draft_sampling, "spec", "draft_sampling"),
            rule_of(own, report),
            text(own.max_num_requests, "engine", "max_num_requests"),
            target_hash(report.run) or str(mapping(report.config, "model").get("path") or ""),
            ", ".join(filter(None, _hardware(report.run))),
            _text_settings(report),
        )

    @property
    def head_facts(self) -> Mapping[str, object]:
        """What the file tells of the condition's heads; empty where it tells nothing."""
        record, head = self.run.report.run, self.summary.result.head or ""
        return mapping(mapping(record, "heads"), head) or mapping(record, "head")

    @property
    def head_label(self) -> str:
        """Unroll and N of the heads where the file tells them, else `head_name` of their folder."""
        facts = self.head_facts
        if facts.get("unroll"):
            return printable(f"{facts['unroll']} N={facts.get('num_mtp_modules')}")
        head = self.summary.result.head or mapping(self.run.report.config, "spec").get("head")
        return printable(head_name(str(head)) if head else "no head")

    @property
    def is_match(self) -> bool:
        """The policy shows the heads what they were trained on."""
        return MATCHING_POLICY.get(str(self.head_facts.get("unroll"))) == self.summary.result.policy

    @property
    def series_name(self) -> str:
        """Head, policy and engine: what differs between the lines of a chart."""
        own = self.summary.result
        words = [self.head_label, own.policy or "", own.engine_name * (own.engine_name != OWN)]
        words += [f"as {own.conventions}"] if own.conventions else []
        return " ".join(filter(None, words))

    @property
    def key(self) -> tuple[str, str]:
        """Names of run and condition, which together are unique."""
        return self.run.name, self.summary.result.label

    @property
    def baseline(self) -> "Entry | None":
        """Plain decoding of the same run at the same batch size and temperature."""
        found = baseline_of(self.summary.result, self.run.report.conditions)
        summaries = (one for one in self.run.report.summaries if one.result is found)
        return next((replace(self, summary=one) for one in summaries), None)


@dataclass(frozen=True)
class PolicyMatrix:
    """Entries of one setting by name of head (row) and policy (column)."""

    setting: Setting
    cells: Mapping[tuple[str, str], Entry]


@dataclass(frozen=True)
class Sweep:
    """Conditions that differ in one part of their setting."""

    part: SweptPart
    shared: str  # the rest in words
    values: tuple[float, ...]  # of the part, ascending
    rows: Mapping[str, tuple[Entry | None, ...]]  # by name of head and policy
    has_parts: bool = False  # prompts differ too: acceptance cannot be compared

    @property
    def members(self) -> list[Entry]:
        """Every entry."""
        return [entry for row in self.rows.values() for entry in row if entry is not None]


def entries(runs: Iterable[Run]) -> list[Entry]:
    """Every condition of every run, baselines included."""
    return [
        Entry(run, summary, digest)
        for run in runs
        for digest in [_prompts_sha256(run.report.prompts)]
        for summary in run.report.summaries
    ]


def drafting(found: Iterable[Entry]) -> list[Entry]:
    """Those that draft."""
    return [entry for entry in found if entry.summary.result.num_speculative_tokens > 0]


def policy_matrices(found: Sequence[Entry]) -> list[PolicyMatrix]:
    """A matrix for every setting that at least two heads share, in the order of the entries."""
    by_setting: dict[Setting, list[Entry]] = {}
    for entry in drafting(found):
        own = entry.summary.result
        # `oracle`, `null` and other engines draft without a policy of ours.
        if own.policy is not None and own.conventions is None:
            by_setting.setdefault(entry.setting, []).append(entry)
    made = []
    for setting, members in by_setting.items():
        names = _head_names(members)
        by_policy = sorted((str(one.summary.result.policy), i) for i, one in enumerate(members))
        cells = {(names[i], printable(policy)): members[i] for policy, i in by_policy}
        if len(set(names)) > 1:
            made.append(PolicyMatrix(setting, cells))
    return made


def _head_names(members: Sequence[Entry]) -> list[str]:
    """A name for the heads of each entry.

    Heads of one kind, such as two seeds, are told apart by their run, and by their own name where
    one run has several.
    """
    heads = [
        (entry.head_label, entry.run.name, str(entry.summary.result.head)) for entry in members
    ]
    names = []
    for label, run, name in heads:
        alike = {other[1:] for other in heads if other[0] == label}
        words = [label]
        if any(other_run != run for other_run, _ in alike):
            words.append(run)
        if any(other_run == run and other != name for other_run, other in alike):
            words.append(name)
        names.append(printable(", ".join(words), limit=48))
    return names


def sweeps(found: Sequence[Entry], part: SweptPart) -> list[Sweep]:
    """Sweeps of one part over at least two values, in the order of the entries."""
    groups: dict[Setting, list[Entry]] = {}
    for entry in drafting(found):
        if _number(entry, part) is not None:
            groups.setdefault(_without(entry.setting, part), []).append(entry)
    made = [_sweep(setting, members, part) for setting, members in groups.items()]
    if part == "batch_size":
        parts: dict[Setting, list[Entry]] = {}
        for sweep, (setting, members) in zip(made, groups.items(), strict=True):
            if len(sweep.values) == 1:
                blank = setting._replace(num_prompts=0, prompts_sha256="")
                parts.setdefault(blank, []).extend(members)
        made += [replace(_sweep(*one, part), has_parts=True) for one in parts.items()]
    return [sweep for sweep in made if len(sweep.values) > 1]


def speed_groups(found: Sequence[Entry]) -> dict[tuple[Setting, str], list[Entry]]:
    """By setting and name, the entries at several batch sizes or K that have a baseline.

    Parts of a sweep, which have prompts of their own, meet here: every entry is to be divided by
    K = 0 at the same batch size in the same run, over the same prompts.
    """

    def place(entry: Entry) -> tuple[float, str, int]:
        size = entry.setting.batch_size
        order = float(size) if size.isdigit() else 0.0
        return (order, size, entry.summary.result.num_speculative_tokens)

    groups: dict[tuple[Setting, str], list[Entry]] = {}
    for entry in drafting(found):
        shared = entry.setting._replace(
            num_speculative_tokens=0, batch_size="", num_prompts=0, prompts_sha256=""
        )
        groups.setdefault((shared, entry.series_name), []).append(entry)
    return {
        key: sorted(members, key=place)
        for key, members in groups.items()
        if len({place(entry) for entry in members}) > 1 and any(entry.baseline for entry in members)
    }


def describe(setting: Setting, *, without: str = "") -> str:
    """A setting in words, the part `without` left out."""
    parts = {
        "num_speculative_tokens": f"K={setting.num_speculative_tokens}",
        "prompts_sha256": f"{setting.num_prompts} prompts {setting.prompts_sha256[:8]}",
        "target": f"target {printable(setting.target, limit=_MAX_TARGET)}",
        "dtype": printable(setting.dtype),
        "temperature": f"T={printable(setting.temperature)}",
        "verify": f"{printable(setting.verify)} verification",
        "draft_sampling": f"{printable(setting.draft_sampling)} drafts",
        "draft_length": f"number of drafts: {printable(setting.draft_length)}",
        "batch_size": f"batch {printable(setting.batch_size)}",
        "text": printable(setting.text, limit=_MAX_TEXT),
        "machine": printable(setting.machine, limit=_MAX_TEXT),
    }
    left_out = {without, "verify"} if without == "temperature" else {without}
    left_out |= set() if setting.target else {"target"}
    # A blanked part differs between the conditions that are described together.
    left_out |= {"prompts_sha256"} if not setting.num_prompts else set()
    left_out |= {"num_speculative_tokens"} if not setting.num_speculative_tokens else set()
    return ", ".join(text for part, text in parts.items() if part not in left_out)


def told_apart(descriptions: Sequence[str]) -> list[str]:
    """The parts of each of `describe`'s that not all share, such as `, batch 4`; none of a lone."""
    parts = [description.split(", ") for description in descriptions]
    shared = set(parts[0]).intersection(*parts) if parts else set()
    return ["".join(f", {part}" for part in own if part not in shared) for own in parts]


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


def target_hash(record: Mapping[str, object]) -> str:
    """One hash of `models.fingerprint.target_hashes` in a run record; empty where it has none."""
    hashes = dict(mapping(record, "target"))
    text = json.dumps(hashes, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS] if hashes else ""


def machine_of(record: Mapping[str, object]) -> str:
    """GPUs of a run, or its processor."""
    gpus, processor = _hardware(record)
    return gpus or processor or "unknown machine"


def _hardware(record: Mapping[str, object]) -> tuple[str, str]:
    """GPUs and processor, empty where there is none: the loop runs on both."""
    hardware = mapping(record, "hardware")
    gpus, cpu = hardware.get("gpus"), hardware.get("cpu")
    processor = f"{cpu} ({hardware.get('num_cores')} cores)" if cpu else ""
    return ", ".join(map(str, gpus)) if isinstance(gpus, list) else "", processor


def _text_settings(report: Report) -> str:
    """Length limit, and every other sampling setting that is not the usual one."""
    usual = asdict(SamplingConfig())
    stored = mapping(report.config, "sampling")
    own = {key: stored.get(key, value) for key, value in usual.items()}
    others = [f"{key} {value}" for key, value in own.items()
              if key not in ("temperature", "max_new_tokens") and value != usual[key]]  # fmt: skip
    return ", ".join([f"{own['max_new_tokens']} new tokens", *others])


def _prompts_sha256(prompts: Sequence[PromptEntry]) -> str:
    pairs = sorted((prompt.question_id, prompt.sha256) for prompt in prompts)
    return hashlib.sha256(json.dumps(pairs).encode()).hexdigest()


def _without(setting: Setting, part: SweptPart) -> Setting:
    """The setting with the swept part blanked, so that only the others tell groups apart."""
    if part == "num_speculative_tokens":
        return setting._replace(num_speculative_tokens=0)
    if part == "batch_size":
        return setting._replace(batch_size="")
    # The rule that suits a temperature changes with it: greedy at 0, standard above.
    return setting._replace(temperature="", verify="")


def _number(entry: Entry, part: SweptPart) -> float | None:
    try:
        return float(entry.setting._asdict()[part])
    except ValueError:
        return None


def _sweep(setting: Setting, members: Sequence[Entry], part: SweptPart) -> Sweep:
    values = sorted({value for entry in members if (value := _number(entry, part)) is not None})
    at: dict[str, dict[float, Entry]] = {}
    for entry in members:
        value, name = _number(entry, part) or 0.0, entry.series_name
        if value in at.get(name, {}):  # another run has this point already
            name = f"{name}, {entry.run.name}"
        at.setdefault(name, {})[value] = entry
    rows = {name: tuple(found.get(value) for value in values) for name, found in at.items()}
    return Sweep(part, describe(setting, without=part), tuple(values), rows)
