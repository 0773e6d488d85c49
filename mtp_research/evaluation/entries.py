"""The conditions of some runs, each with the setting that decides what it is compared with.

An *entry* is one condition of a run. Two entries are comparable when they agree in the prompts and
in everything but head and policy; `Setting` is what they must agree in. Letters: K drafts per step,
N MTP modules, R requests decoded at a time.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

from mtp_research.config.schema import SamplingConfig
from mtp_research.evaluation.report import Report
from mtp_research.evaluation.runs import Run, mapping
from mtp_research.evaluation.stats.bootstrap import Estimate
from mtp_research.evaluation.stats.outcome import PromptEntry
from mtp_research.evaluation.stats.speed import end_to_end_rate
from mtp_research.evaluation.stats.summary import ConditionSummary
from mtp_research.evaluation.tables import printable

_DIGITS = 12  # of a target's hash


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
        """See `Setting`."""
        report, summary = self.run.report, self.summary
        return Setting(
            summary.num_speculative_tokens,
            report.dtype,
            len(report.prompts),
            self.prompts_sha256,
            _text(summary.temperature, report, "sampling", "temperature"),
            _text(summary.verify, report, "spec", "verify"),
            _text(summary.draft_sampling, report, "spec", "draft_sampling"),
            _text(summary.max_num_requests, report, "engine", "max_num_requests"),
            target_of(report),
            ", ".join(filter(None, _hardware(report.run))),
            _text_settings(report),
        )

    @property
    def head_facts(self) -> Mapping[str, object]:
        """What the file tells of the condition's heads; empty where it tells nothing."""
        record = self.run.report.run
        return mapping(mapping(record, "heads"), self.summary.head or "") or mapping(record, "head")

    @property
    def head_label(self) -> str:
        """Unroll and N of the heads where the file tells them, else the name of their folder."""
        facts = self.head_facts
        if facts.get("unroll"):
            return printable(f"{facts['unroll']} N={facts.get('num_mtp_modules')}")
        head = self.summary.head or mapping(self.run.report.config, "spec").get("head")
        return printable(Path(str(head)).name if head else "no head")

    @property
    def unroll(self) -> str | None:
        """What the heads were trained with, where the file tells it."""
        unroll = self.head_facts.get("unroll")
        return unroll if isinstance(unroll, str) else None

    @property
    def series_name(self) -> str:
        """Head and policy: what differs between the lines of a chart."""
        return f"{self.head_label} {self.summary.policy or ''}".strip()

    @property
    def baseline(self) -> "Entry | None":
        """Plain decoding of the same run at the same batch size and temperature."""
        found = (
            other
            for other in self.run.report.summaries
            if other.num_speculative_tokens == 0 and other.group == self.summary.group
        )
        plain = next(found, None)
        return None if plain is None else replace(self, summary=plain)

    @property
    def tokens_per_s(self) -> Estimate:
        """Output tokens per second, end to end; from the slowest to the fastest pass."""
        return end_to_end_rate(self.summary.speed)


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
    return [entry for entry in found if entry.summary.num_speculative_tokens > 0]


def target_of(report: Report) -> str:
    """Hash of the target's sizes, weights and tokenizer; its path where the file holds none."""
    return target_hash(report.run) or str(mapping(report.config, "model").get("path") or "")


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
    others = [
        f"{key} {stored[key]}"
        for key, value in usual.items()
        if key not in ("temperature", "max_new_tokens") and stored.get(key, value) != value
    ]
    limit = stored.get("max_new_tokens", usual["max_new_tokens"])
    return ", ".join([f"{limit} new tokens", *others])


def _text(own: object, report: Report, group: str, key: str) -> str:
    """The condition's own value, else the configuration's."""
    return str(mapping(report.config, group).get(key) if own is None else own)


def _prompts_sha256(prompts: Sequence[PromptEntry]) -> str:
    pairs = sorted((prompt.question_id, prompt.sha256) for prompt in prompts)
    return hashlib.sha256(json.dumps(pairs).encode()).hexdigest()
