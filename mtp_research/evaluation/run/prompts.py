"""Prompts of an evaluation: shipped, cut from the standard library, or read from the user's files.

First stage of the flow: prompts -> decode loop -> statistics -> report. `prompt_files` describes
the file formats. Code prompts are cut at run time from the running interpreter's standard library:
each is a function of a held-out module, broken off in the middle of its body. The cut depends on
the source text and the seed only, so one Python version always gives the same prompts; another
version may give others, which is why every prompt is recorded with its hash.
"""

import ast
import hashlib
import sysconfig
import textwrap
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

from mtp_research.data.prompt_text import ChatTokenizer, chat_ids, completion_ids
from mtp_research.data.sources import HELD_OUT_STDLIB
from mtp_research.evaluation.run.prompt_files import Prompt, read_prompt_files
from mtp_research.evaluation.stats.outcome import PromptEntry
from mtp_research.runtime.errors import ConfigError, IntegrityError
from mtp_research.runtime.provenance import resolve_path, shipped_root

SHIPPED_PROMPTS = shipped_root() / "assets" / "lab_tiny" / "prompts"
CODE_CATEGORY = "code"
NUM_CODE_PROMPTS = 28
CODE_SEED = 0  # fixed: evaluations with different seeds must still ask the same prompts
MIN_CHARACTERS = 300
MAX_CHARACTERS = 600
MIN_REMAINING_LINES = 2  # of the function after the cut: what the model completes
_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class EncodedPrompts:
    """Prompts that fit the context, and the ids of those that do not."""

    prompts: tuple[Prompt, ...]
    token_ids: tuple[tuple[int, ...], ...]
    skipped: tuple[str, ...]

    @property
    def entries(self) -> tuple[PromptEntry, ...]:
        """The prompts without their text."""
        return tuple(
            PromptEntry(one.question_id, one.category, one.format, one.sha256)
            for one in self.prompts
        )

    def longest_text(self, max_new_tokens: int) -> int:
        """Tokens that the longest prompt can grow to; one more is never reached."""
        return max(map(len, self.token_ids), default=0) + max_new_tokens + 1

    def without(self, done: Set[str]) -> "EncodedPrompts":
        """The prompts whose ids are not among `done`; none of them is skipped."""
        pairs = zip(self.prompts, self.token_ids, strict=True)
        left = [(prompt, ids) for prompt, ids in pairs if prompt.question_id not in done]
        return EncodedPrompts(tuple(p for p, _ in left), tuple(ids for _, ids in left), ())


def load_prompts(
    path: str | None, *, domains: Sequence[str] = (), max_prompts: int | None = None, seed: int = 0
) -> list[Prompt]:
    """A prompt set in file order: a path as in `prompt_files`, or None for the shipped prompts.

    Args:
        path: None adds the code prompts of the running interpreter.
        domains: categories that are kept; all without any.
        max_prompts: keep a balanced subset of this size, >= 1; None keeps all.
        seed: selects the subset. Smaller subsets are contained in larger ones.

    Raises:
        ConfigError: there is no such path or no prompt of a domain, or `max_prompts` < 1.
        IntegrityError: a prompt file is damaged; the message names file and line.
    """
    if max_prompts is not None and max_prompts < 1:
        raise ConfigError(
            f"prompts.max_prompts must be >= 1, got {max_prompts}; leave it out for all prompts."
        )
    if path is None:
        prompts = read_prompt_files(SHIPPED_PROMPTS) + _code_prompts()
    else:
        prompts = read_prompt_files(resolve_path(path))
    prompts = _of_domains(prompts, domains)
    return prompts if max_prompts is None else _balanced(prompts, max_prompts, seed)


def encode_prompt(prompt: Prompt, tokenizer: ChatTokenizer) -> tuple[int, ...]:
    """Token ids that the model is given.

    `chat` goes through the model's template, with the opening of the assistant's turn;
    `completion` is the bos token, if the tokenizer has one, and the text.
    """
    if prompt.format == "completion":
        return completion_ids(prompt.turns[0], tokenizer)
    if tokenizer.chat_template is None:
        raise ConfigError(
            f"prompt {prompt.question_id} has format chat, but the model's tokenizer has no chat "
            "template; choose prompts with format completion (prompts.path) or a chat model."
        )
    return chat_ids([{"role": "user", "content": prompt.turns[0]}], tokenizer)


def encode_prompts(
    prompts: Sequence[Prompt], tokenizer: ChatTokenizer, *, max_model_len: int
) -> EncodedPrompts:
    """Token ids of the prompts; those that leave no room for a token are skipped and counted.

    Raises:
        IntegrityError: none fits.
    """
    token_ids = tuple(encode_prompt(prompt, tokenizer) for prompt in prompts)
    pairs = zip(prompts, token_ids, strict=True)
    skipped = tuple(prompt.question_id for prompt, ids in pairs if len(ids) >= max_model_len)
    if len(skipped) == len(prompts):
        raise IntegrityError(
            f"all {len(prompts)} prompts have {max_model_len} tokens or more, the context length; "
            "use shorter prompts or raise engine.max_model_len."
        )
    fitting = EncodedPrompts(tuple(prompts), token_ids, ()).without(set(skipped))
    return replace(fitting, skipped=skipped)


def _of_domains(prompts: Sequence[Prompt], domains: Sequence[str]) -> list[Prompt]:
    known = {prompt.category for prompt in prompts}
    if unknown := sorted(set(domains) - known):
        raise ConfigError(
            f"prompts.domains must be among {', '.join(sorted(known))}, got {', '.join(unknown)}; "
            "leave it out for all of them."
        )
    return [prompt for prompt in prompts if not domains or prompt.category in domains]


def _code_prompts() -> list[Prompt]:
    cuts = cut_code(HELD_OUT_STDLIB, num_prompts=NUM_CODE_PROMPTS, seed=CODE_SEED)
    return [Prompt(origin, CODE_CATEGORY, (text,), "completion") for origin, text in cuts]


def _balanced(prompts: Sequence[Prompt], max_prompts: int, seed: int) -> list[Prompt]:
    """One prompt of every category, then a second one, ... until `max_prompts`; in file order."""
    by_category: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_category.setdefault(prompt.category, []).append(prompt)
    order = []  # (rank within the category, category, id)
    for category, members in by_category.items():
        members.sort(key=lambda prompt: _rank(seed, prompt.question_id, prompt.sha256))
        order += [(rank, category, prompt.question_id) for rank, prompt in enumerate(members)]
    kept = {name for _, _, name in sorted(order)[:max_prompts]}
    return [prompt for prompt in prompts if prompt.question_id in kept]


class CodeCut(NamedTuple):
    """One prompt: where it was cut (`bisect.py:insort_left:31`) and the text before the cut."""

    origin: str
    text: str


def cut_code(
    modules: Sequence[str], *, num_prompts: int, seed: int = 0, root: Path | None = None
) -> list[CodeCut]:
    """At most `num_prompts` function bodies, spread as evenly over the modules as they allow.

    Args:
        modules: file names relative to `root`; a missing file gives no prompts.
        num_prompts: fewer are returned when the modules do not hold as many.
        seed: selects the functions and the line of each cut.
        root: folder of the sources; None is the standard library.

    Returns:
        Texts of `MIN_CHARACTERS` to `MAX_CHARACTERS` characters: a dedented signature, its
        docstring if any and some lines of the body, up to a line end. Sorted by origin.
    """
    root = Path(sysconfig.get_paths()["stdlib"]) if root is None else root
    ranked = [_ranked_cuts(root / name, seed) for name in modules if (root / name).is_file()]
    rounds = zip_longest(*ranked)  # the best cut of every module, then the second best, ...
    cuts = [cut for one_round in rounds for cut in one_round if cut is not None]
    return sorted(cuts[:num_prompts])


def _ranked_cuts(path: Path, seed: int) -> list[CodeCut]:
    source = path.read_text(encoding="utf8")
    lines = source.splitlines()
    cuts = []
    for name, node in _functions(ast.parse(source).body):
        first = node.body[0].end_lineno or node.body[0].lineno  # end of docstring or statement
        options = [
            CodeCut(f"{path.name}:{name}:{last}", text)
            for last in range(first, (node.end_lineno or 0) - MIN_REMAINING_LINES + 1)
            if (text := _text_before(lines, node, last)) is not None
        ]
        if options:
            cuts.append(min(options, key=lambda cut: _rank(seed, *cut)))
    return sorted(cuts, key=lambda cut: _rank(seed, *cut))


def _functions(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[str, _Function]]:
    """Qualified name and node of functions and methods; nested functions are skipped."""
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from _functions(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, _Function):
            yield f"{prefix}{node.name}", node


def _text_before(lines: list[str], node: _Function, last: int) -> str | None:
    """The function up to and including line `last` (from 1), None where that is no fair prompt."""
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    if not lines[last - 1].strip():
        return None  # a blank last line would leave the indentation of the next one open
    text = textwrap.dedent("\n".join(lines[first - 1 : last])) + "\n"
    # A string with text in column 0 defeats the dedent of a method.
    is_dedented = not text[0].isspace()
    return text if is_dedented and MIN_CHARACTERS <= len(text) <= MAX_CHARACTERS else None


def _rank(seed: int, name: str, content: str) -> str:
    """A seeded order that does not depend on the random generator of a library version."""
    return hashlib.sha256(f"{seed}:{name}:{content}".encode()).hexdigest()
