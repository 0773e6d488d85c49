"""`fault_price.json`: what each decoding of a price study left behind, read back with checks.

Written by `study_tables`, which computes the figures; filled by `fault_price`, which decodes.
Letters: K drafts per step, N MTP modules.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mtp_research.evaluation.report.stored import PromptEntry
from mtp_research.evaluation.stats.statistics import few_prompts
from mtp_research.policy.audit import Verdict
from mtp_research.runtime.errors import IntegrityError
from mtp_research.runtime.files import require_file

FAULTS = (Verdict.WRONG, Verdict.MIXED, Verdict.HOLE)
STUDY_FILE = "fault_price.json"
SCHEMA_VERSION = 1
UNFINISHED = "unfinished"  # in place of a text's hash: the generation did not end


@dataclass(frozen=True)
class FaultCondition:
    """One decoding of all prompts."""

    head: str  # name of the head folder
    num_mtp_modules: int  # N
    num_speculative_tokens: int  # K
    policy: str  # what was run
    reference: str | None  # the policy's clean form; None for a clean policy
    audit: dict[str, int]  # slots by verdict, and `slots`, the number looked at
    accepted_per_round: tuple[tuple[int, ...], ...]  # of each prompt, in the order of the prompts
    # Of each prompt's generated token ids, 16 digits; greedy ones agree everywhere
    text_sha256: tuple[str, ...]

    @property
    def key(self) -> tuple[str, int, str]:
        """Head, K and policy."""
        return self.head, self.num_speculative_tokens, self.policy

    @property
    def shares(self) -> NDArray[np.float64]:
        """WRONG, MIXED and HOLE in percent of the slots."""
        slots = max(self.audit["slots"], 1)
        return np.array([100 * self.audit[fault] / slots for fault in FAULTS])


@dataclass(frozen=True)
class FaultStudy:
    """All decodings."""

    heads: tuple[dict[str, object], ...]  # name, spec and hash of each
    prompts: tuple[PromptEntry, ...]  # what was asked
    conditions: tuple[FaultCondition, ...]  # what was decoded so far
    dtype: str  # of the target
    max_new_tokens: int  # per prompt
    seed: int  # of the bootstrap
    # Command, code, versions, machine, `num_conditions` and `seconds` of decoding; `parts` if it
    # was joined from several
    run: Mapping[str, object]

    @property
    def num_asked(self) -> int:
        """Conditions of the whole study: from the run record, else heads x K x policies so far.

        The second, for files without the number, is too small while the first head and K are not
        done with all policies, or no second K was begun.
        """
        stored = self.run.get("num_conditions")
        if isinstance(stored, int):
            return stored
        drafts = {condition.num_speculative_tokens for condition in self.conditions}
        policies = {condition.policy for condition in self.conditions}
        return max(len(self.heads) * len(drafts) * len(policies), len(self.conditions))

    @property
    def parts(self) -> list[Mapping[str, object]]:
        """Records of the studies that this one was joined from; empty if it was decoded whole."""
        stored = self.run.get("parts")
        return (
            [one for one in stored if isinstance(one, Mapping)] if isinstance(stored, list) else []
        )

    @property
    def num_other_texts(self) -> int:
        """Texts that differ from the first condition's, over all conditions and prompts."""
        first = self.conditions[0].text_sha256 if self.conditions else ()
        return sum(
            ours != theirs
            for condition in self.conditions
            for ours, theirs in zip(condition.text_sha256, first, strict=True)
        )


def read_study(folder: Path) -> FaultStudy:
    """Read `fault_price.json`; figures are computed again from the counters.

    Raises:
        ConfigError: there is no such file.
        IntegrityError: no JSON, of another version, or with wrong fields.
    """
    path = folder / STUDY_FILE
    require_file(path, kind="price study")
    try:
        stored = json.loads(path.read_text(encoding="utf8"))
        if stored.get("schema_version") != SCHEMA_VERSION:
            raise IntegrityError(f"{path}: expected schema_version {SCHEMA_VERSION}; price again.")
        study = FaultStudy(
            heads=tuple(stored["heads"]),
            prompts=tuple(PromptEntry(**one) for one in stored["prompts"]),
            conditions=tuple(map(_condition, stored["conditions"])),
            **{name: stored[name] for name in ("dtype", "max_new_tokens", "seed", "run")},
        )
        _check(study)
    except IntegrityError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise IntegrityError(f"{path} is not a readable price study: {error}.") from None
    return study


def study_warnings(study: FaultStudy) -> list[str]:
    """What a reader must know before the tables; without a prefix."""
    warnings, num_done = [], len(study.conditions)
    if num_done < study.num_asked:
        warnings.append(
            f"unfinished: {num_done} of {study.num_asked} conditions were decoded, the others are "
            "in no table"
        )
    warnings += few_prompts(len(study.prompts))
    if study.num_other_texts:
        warnings.append(f"{verdict(study)}: where texts differ, so do the slots compared")
    return warnings


def verdict(study: FaultStudy) -> str:
    """How many texts agree; plain decoding and the replay walk are no conditions of a study."""
    total = len(study.conditions) * len(study.prompts)
    return f"{total - study.num_other_texts} of {total} texts are those of the first condition"


def _condition(fields: dict[str, Any]) -> FaultCondition:  # Any: as json.loads returns it
    rounds = tuple(map(tuple, fields["accepted_per_round"]))
    lists = {"accepted_per_round": rounds, "text_sha256": tuple(fields["text_sha256"])}
    return FaultCondition(**{**fields, **lists})


def _check(study: FaultStudy) -> None:
    for one in study.conditions:
        counts = [count for rounds in one.accepted_per_round for count in rounds]
        sizes = {len(one.accepted_per_round), len(one.text_sha256)}
        is_sound = sizes == {len(study.prompts)} and all(
            isinstance(count, int) and 0 <= count <= one.num_speculative_tokens for count in counts
        )
        if not is_sound or not {"slots", *FAULTS} <= one.audit.keys():
            raise ValueError(f"{one.key} lacks prompts, verdicts, or accepts more than K")
