"""Hidden-state policies as data: which rows a draft pass runs and what it feeds them, as fields.

Policies differ only in which rows a pass runs and where token and hidden vector of a row come from.
The fields here say so; `policy.plan_pass` turns them into index tensors, and the trainer's unrolls
take their token offsets and module order from here.

Letters: R requests, K drafts per step, N MTP modules, p frontier row, m draft step.
Source: DeepSeek-V3 (arXiv:2412.19437) for the chain, EAGLE (arXiv:2401.15077) for recycling.
"""

from dataclasses import dataclass, fields
from typing import Literal, get_args, get_type_hints

from mtp_research.runtime.errors import ConfigError

ModuleSchedule = Literal["cycle", "first", "last"]
MODULE_SCHEDULES: tuple[ModuleSchedule, ...] = ("cycle", "first", "last")


@dataclass(frozen=True)
class HiddenPolicy:
    """One hidden-state procedure.

    Attributes:
        name: config name.
        rows: base rows of a pass. `anchored`: the K+1 rows ending at the frontier, so that every
            row whose token may have been a rejected draft is rerun. `fresh`: the newly verified
            rows only. `window`: the K rows ending at the frontier.
        shift_tokens: row q of pass m consumes text[q+1+m] (True) or text[q+1] (False).
        hidden: hidden vector of base rows in passes m >= 1. `chain`: output of pass m-1 at the same
            row. `target`: H_q. `shifted_target`: H_{q+m}, or g_{q+m-p} where that row is not
            verified yet.
        draft_rows: rows above the frontier, fed with the module's own output. `none`;
            `since_last_pass`: all that this module has not written in this round; `newest`: only
            the last one.
        every_module: passes m >= 1 have base rows too (False: only pass 0 has).
        clean: after every round each slot <= p holds what a recompute over the committed text would
            put there.
        seen_in: engines that behave like this.

    Raises:
        ConfigError: a field has another value than these; or passes m >= 1 would have no rows; or
            rows above the frontier stand beside `chain`, which has inputs for base rows alone, or
            beside shifted tokens, which end at the frontier.
    """

    name: str
    rows: Literal["anchored", "fresh", "window"]
    shift_tokens: bool
    hidden: Literal["chain", "target", "shifted_target"]
    draft_rows: Literal["none", "since_last_pass", "newest"]
    every_module: bool
    clean: bool
    seen_in: str

    def __post_init__(self) -> None:
        for name, kind in get_type_hints(type(self)).items():
            legal = get_args(kind) or ((True, False) if kind is bool else ())
            got = getattr(self, name)
            if legal and got not in legal:
                raise ConfigError(
                    f"policy {self.name!r}: {name} must be one of {', '.join(map(str, legal))}, "
                    f"got {got!r}."
                )
        if self.draft_rows == "none" and not self.every_module:
            raise ConfigError(
                f"policy {self.name!r}: later passes must have rows, got draft_rows='none' and "
                "every_module=False; change one of them."
            )
        if self.draft_rows != "none" and (self.shift_tokens or self.hidden == "chain"):
            raise ConfigError(
                f"policy {self.name!r}: draft_rows={self.draft_rows!r} needs shift_tokens=False "
                f"and another hidden than 'chain', got {self.shift_tokens} and {self.hidden!r}; "
                "set draft_rows='none'."
            )

    @property
    def procedure(self) -> str:
        """What decides which rows run: the fields but for the name and what is said of it."""
        ours = [one.name for one in fields(self) if one.name not in ("name", "clean", "seen_in")]
        return " ".join(f"{name}={getattr(self, name)}" for name in ours)

    def num_kv_layers(self, num_speculative_tokens: int, num_mtp_modules: int) -> int:
        """KV layers: one per depth where each depth sees its own history, else one per module."""
        if self.shift_tokens:
            return num_speculative_tokens
        return min(num_mtp_modules, max(num_speculative_tokens, 1))

    def kv_layer(self, draft_step: int, module_idx: int) -> int:
        """KV layer (0-based among the draft layers) that pass `draft_step` writes."""
        return draft_step if self.shift_tokens else module_idx


# fmt: off
# name, rows, shift_tokens, hidden, draft_rows, every_module, clean, seen_in
POLICIES: dict[str, HiddenPolicy] = {
    policy.name: policy
    for policy in (
        HiddenPolicy("eagle", "fresh", False, "target", "since_last_pass", True, True,
                     "vLLM, SGLang, TensorRT-LLM, llama.cpp"),
        HiddenPolicy("training", "anchored", True, "chain", "none", True, True,
                     "vLLM model runner v2, transformers"),
        HiddenPolicy("eagle_norefresh", "fresh", False, "target", "newest", False, False,
                     "vLLM's first Step-3.5 path"),
        HiddenPolicy("training_norefresh", "fresh", True, "chain", "none", True, False,
                     "SGLang for Step-3.5"),
        HiddenPolicy("window", "window", True, "shifted_target", "none", True, False,
                     "TensorRT-LLM's multi-module worker"),
        HiddenPolicy("target_roll", "fresh", True, "target", "none", True, False,
                     "SGLang for MiMo-V2"),
    )
}
# fmt: on

# The decode policy that shows a head the inputs it was trained on.
MATCHING_POLICY: dict[str, str] = {
    "chain": "training",
    "mixed": "training",
    "ttt": "eagle",
    "shared_context": "eagle",
    "independent": "target_roll",
}


def module_index(schedule: ModuleSchedule, draft_step: int, num_mtp_modules: int) -> int:
    """Module that runs pass `draft_step` (training depth `draft_step + 1`)."""
    if schedule == "first":
        return 0
    if schedule == "last":
        return min(draft_step, num_mtp_modules - 1)
    return draft_step % num_mtp_modules


def token_offset(policy: HiddenPolicy, draft_step: int) -> int:
    """Distance from a base row to the token it consumes."""
    return 1 + draft_step if policy.shift_tokens else 1
