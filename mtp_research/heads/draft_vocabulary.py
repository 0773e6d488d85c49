"""Drafting from the most frequent tokens only: fewer rows of the output projection are read.

At batch 1 the output projection is most of what a draft pass reads. The text stays the target's,
since verification scores the whole vocabulary; what is lost are drafts of rare tokens.

`token_ranking.json` in a head folder lists the vocabulary by falling frequency in the answers that
the heads were trained on (`python -m mtp_research.training.token_ranking`).

Letters: V vocabulary, V' the part of it that is drafted, D hidden, R requests.
Source: reduced draft vocabularies FR-Spec (arXiv:2502.14856), FastMTP (arXiv:2509.18362).
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from mtp_research.heads.publish import RANKING_FILE
from mtp_research.heads.stack import MTPHeads
from mtp_research.models.target import Target, target_hashes
from mtp_research.runtime.errors import ConfigError, IntegrityError
from mtp_research.runtime.files import write_atomically

_SCHEMA = 1
_COMMAND = "python -m mtp_research.training.token_ranking --target MODEL --head FOLDER --data FILE"


@dataclass(frozen=True)
class DraftVocabulary:
    """The tokens that may be drafted."""

    token_ids: Tensor  # `[V']` int64, rising
    # rows of the output projection for these tokens, each `[V', D]`: one for all modules, or one
    # per module where each has a head of its own; of ranks that split a target `[V' / n, D]`
    weights: tuple[Tensor, ...]
    vocab_size: int  # V

    def of_module(self, module_idx: int) -> "DraftVocabulary":
        """The same with the weight of one module alone."""
        return replace(self, weights=(self.weights[module_idx % len(self.weights)],))

    def logits(self, post_norm: Tensor) -> Tensor:
        """Draft logits `[R, V']`, or this rank's, of outputs `[R, D]` of the first module."""
        return functional.linear(post_norm, self.weights[0])

    def spread(self, logits: Tensor) -> Tensor:
        """Logits `[R, V]` of logits `[R, V']`; -inf for tokens that are never drafted."""
        whole = logits.new_full((len(logits), self.vocab_size), -torch.inf)
        return whole.index_copy(1, self.token_ids, logits)


def restrict_vocabulary(heads: MTPHeads, token_ids: Sequence[int]) -> DraftVocabulary:
    """Copy the rows of `heads`' output projections that score some tokens.

    `token_ids` are distinct, in [0, V), at least one, in any order.
    """
    weights = heads.output_weights
    vocab_size = weights[0].shape[0]
    chosen = sorted(set(token_ids))
    if not chosen or len(chosen) != len(token_ids) or chosen[0] < 0 or chosen[-1] >= vocab_size:
        raise ConfigError(
            f"a draft vocabulary must hold distinct token ids in 0..{vocab_size - 1}, got "
            f"{len(token_ids)} ids, {len(chosen)} of them distinct"
            f"{f', from {chosen[0]} to {chosen[-1]}' if chosen else ''}; set draft_token_ids=None."
        )
    ids, parts = torch.tensor(chosen, device=weights[0].device), heads.target.parts
    if parts is None:
        return DraftVocabulary(ids, tuple(weight[ids] for weight in weights), vocab_size)
    if len(ids) % parts.num_ranks:
        raise ConfigError(
            f"spec.draft_vocabulary_size must be a multiple of {parts.num_ranks} for as many "
            f"processes of model.tp_plan, got {len(ids)}; set "
            f"spec.draft_vocabulary_size={len(ids) // parts.num_ranks * parts.num_ranks}."
        )
    return DraftVocabulary(ids, tuple(weight[parts.rows(ids)] for weight in weights), vocab_size)


def write_ranking(folder: Path, counts: Tensor, *, target: Target, source: str) -> None:
    """Write `token_ranking.json` into the folder of heads.

    `counts`, `[V]` int64, says how often each token was seen, equal counts keep the order of ids;
    `source` tells readers what was counted.
    """
    order = torch.argsort(counts, descending=True, stable=True)
    record = {
        "schema": _SCHEMA,
        "source": source,
        "num_tokens": int(counts.sum()),
        "num_seen": int((counts > 0).sum()),
        "vocab_size": len(counts),
        "tokenizer_sha256": target_hashes(target)["tokenizer_sha256"],
        "token_ids": order.tolist(),
    }
    write_atomically(folder / RANKING_FILE, json.dumps(record) + "\n")


def most_frequent(folder: str | Path, *, num_tokens: int, target: Target) -> list[int]:
    """The first `num_tokens` tokens of a head folder's ranking."""
    path = Path(folder) / RANKING_FILE
    if not path.is_file():
        raise ConfigError(
            f"spec.draft_vocabulary_size needs {RANKING_FILE} in spec.head, {str(folder)!r} has "
            f"none; run {_COMMAND}, or set spec.draft_vocabulary_size=null."
        )
    try:
        record = json.loads(path.read_text(encoding="utf8"))
        token_ids, vocab_size = record["token_ids"], record["vocab_size"]
        is_whole = record["schema"] == _SCHEMA and sorted(token_ids) == list(range(vocab_size))
    except (OSError, ValueError, KeyError, TypeError) as fault:
        raise IntegrityError(
            f"{path} must be a token ranking, got {fault!r}; {_COMMAND}."
        ) from None
    if not is_whole:
        raise IntegrityError(
            f"{path} must rank each of {vocab_size} tokens once in schema {_SCHEMA}; {_COMMAND}."
        )
    tokenizer = target_hashes(target)["tokenizer_sha256"]
    if vocab_size != target.config.vocab_size or record.get("tokenizer_sha256") != tokenizer:
        raise ConfigError(
            f"{path} must rank the tokens of this target ({target.config.vocab_size}), it was made "
            f"with another tokenizer ({vocab_size}); run {_COMMAND}."
        )
    if not 0 < num_tokens <= vocab_size:
        raise ConfigError(
            f"spec.draft_vocabulary_size must be in 1..{vocab_size}, got {num_tokens}; "
            f"set spec.draft_vocabulary_size={vocab_size}."
        )
    return token_ids[:num_tokens]
