"""Legal values of the schema's keys: the lists of names, and how a field states what it takes.

The sections in `config_training`, `config_decode` and `config_evaluation` and the two roots in
`config` are written with these; `validation` enforces what a field states.
"""

from dataclasses import field
from typing import TypeVar

from mtp_research.runtime.errors import ConfigError

MAX_SPECULATIVE_TOKENS = 64
POLICIES = (
    "eagle",
    "eagle_norefresh",
    "target_roll",
    "training",
    "training_norefresh",
    "window",
)
CLEAN_POLICIES = ("eagle", "training")  # their draft KV depends on the text alone
COMPARED_POLICIES = CLEAN_POLICIES
VERIFY_RULES = ("block", "greedy", "relaxed", "standard", "synthetic", "typical")
DRAFT_LENGTHS = ("batch_table", "confidence", "expected_gain", "fixed")
ARGMAX_RULES = ("greedy", "relaxed")  # they take the target's argmax: temperature must be 0
MODULE_SCHEDULES = ("cycle", "first", "last")
NORMS = ("post_norm", "pre_norm")
UNROLLS = ("chain", "independent", "mixed", "shared_context", "ttt")
LOSS_TERMS = ("ce", "e2e_tv", "hidden", "kl", "lk", "tv")
DEPTH_WEIGHTS = ("decay", "dpace", "expected_length", "uniform")
PARALLEL = ("ddp", "fsdp2", "zero1", "zero2", "zero3")
PRECISIONS = ("auto", "bfloat16", "float16", "float32", "float64")

Number = TypeVar("Number", int, float, int | None, float | None)


def within(default: Number, low: float, high: float) -> Number:
    """A key in [low, high]; None is legal where the annotation allows it."""
    return field(default=default, metadata={"low": low, "high": high})


def above(default: float, low: float, high: float) -> float:
    """A key in (low, high]."""
    return field(default=default, metadata={"low": low, "high": high, "open_low": True})


def one_of(default: str, *choices: str) -> str:
    """A key that takes one of the choices."""
    return field(default=default, metadata={"choices": tuple(sorted(choices))})


def parse_loss(text: str) -> dict[str, float]:
    """Terms and weights of `objective.loss`: `kl+0.1*hidden` is {"kl": 1.0, "hidden": 0.1}.

    Raises:
        ConfigError: an unknown term, a term named twice, or a weight that is not above 0.
    """
    weights: dict[str, float] = {}
    for part in text.replace(" ", "").split("+"):
        factor, _, name = part.rpartition("*")
        try:
            weight = float(factor) if factor else 1.0
        except ValueError:
            weight = 0.0
        if name not in LOSS_TERMS or name in weights or not 0 < weight < float("inf"):
            raise ConfigError(
                f"objective.loss must be a sum of {' | '.join(LOSS_TERMS)}, each once and with an "
                f"optional weight above 0, got {text}; set objective.loss=kl+0.1*hidden."
            )
        weights[name] = weight
    return weights
