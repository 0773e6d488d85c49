"""The sections of `eval.py` that say what is measured: prompts, lists of values and timing."""

from dataclasses import dataclass, field

from mtp_research.config_choices import MAX_SPECULATIVE_TOKENS, within


@dataclass
class PromptsConfig:
    """What is decoded."""

    name: str = "lab"
    # question.jsonl or a folder of them; None: shipped prompts and standard-library code.
    path: str | None = None
    domains: list[str] = field(default_factory=list)  # categories that are kept; empty: all
    max_prompts: int | None = within(None, 1, 10**9)


@dataclass
class GridConfig:
    """Lists of values: every combination is measured, in one process on the same prompts.

    An empty list means the one value of the key in `GRID_AXES`. On the command line a list for that
    key goes here: `spec.k=[1,3]`.
    """

    num_speculative_tokens: list[int] = field(
        default_factory=list, metadata={"low": 0, "high": MAX_SPECULATIVE_TOKENS}
    )
    head: list[str | None] = field(default_factory=list)
    draft_sampling: list[str] = field(
        default_factory=list, metadata={"choices": ("greedy", "processed", "sample")}
    )
    temperature: list[float] = field(default_factory=list, metadata={"low": 0.0, "high": 100.0})
    max_num_requests: list[int] = field(default_factory=list, metadata={"low": 1, "high": 1 << 16})


GRID_AXES = {
    "grid.num_speculative_tokens": "spec.num_speculative_tokens",
    "grid.head": "spec.head",
    "grid.draft_sampling": "spec.draft_sampling",
    "grid.temperature": "sampling.temperature",
    "grid.max_num_requests": "engine.max_num_requests",
}


@dataclass
class TimingConfig:
    """How the conditions of an evaluation take turns."""

    # Decodings of the prompt set by each condition, one or an even number: with two, conditions
    # A and B run in the order A B B A, which takes a slow drift of the machine out of the ratios.
    passes: int = within(1, 1, 100)
    # File, on a disk of the machine, on which evaluations take turns: those that name the same one
    # compile and capture side by side, and each decodes alone. Their pools lie beside each other,
    # so set engine.max_model_len or engine.num_blocks.
    turns: str | None = None
