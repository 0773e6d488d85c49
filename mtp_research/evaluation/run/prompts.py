"""Prompts of an evaluation: shipped, cut from the standard library, or read from the user's files.

First stage of the flow: prompts -> decode loop -> statistics -> report. `prompt_files` describes
the file formats. Code prompts are cut at run time from the running interpreter's standard library:
each is a function of a held-out module, broken off in the middle of its body. The cut depends on
the source text and the seed only, so one Python version always gives the same prompts; another
version may give others, which is why every prompt is recorded with its hash.
"""

import ast
import functools
import hashlib
import re
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
THINKING_MARKERS = ("<think>", "</think>")
_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class EncodedPrompts:
    """Prompts that fit the context, and the ids of those that do not."""

    prompts: tuple[Prompt, ...]
    token_ids: tuple[tuple[int, ...], ...]
    skipped: tuple[str, ...]
    thinking_token_ids: tuple[int, int] | None = None  # begin and end of a thinking part

    @property
    def entries(self) -> tuple[PromptEntry, ...]:
        """The prompts without their text."""
        token_ids = self.token_ids or ((),) * len(self.prompts)
        return tuple(
            PromptEntry(
                one.question_id,
                one.category,
                one.format,
                one.sha256,
                num_turns=len(one.turns),
                opens_thinking=self._opens_thinking(ids),
            )
            for one, ids in zip(self.prompts, token_ids, strict=True)
        )

    def _opens_thinking(self, token_ids: Sequence[int]) -> bool:
        """Whether a thinking part has begun and not ended at the end of a prompt."""
        marks = [one for one in token_ids if one in (self.thinking_token_ids or ())]
        return (
            bool(marks)
            and self.thinking_token_ids is not None
            and (marks[-1] == self.thinking_token_ids[0])
        )

    def by_id(self) -> dict[str, tuple[int, ...]]:
        """Token ids of each prompt, in order."""
        ids = (prompt.question_id for prompt in self.prompts)
        return dict(zip(ids, self.token_ids, strict=True))

    def longest_text(self, max_new_tokens: int) -> int:
        """Tokens that the longest prompt can grow to; one more is never reached."""
        return max(map(len, self.token_ids), default=0) + max_new_tokens + 1

    def share(self, rank: int, num_ranks: int) -> "EncodedPrompts":
        """The prompts of one of several ranks, dealt in turn; none of them is skipped."""
        mine = slice(rank, None, num_ranks)
        return replace(self, prompts=self.prompts[mine], token_ids=self.token_ids[mine], skipped=())

    def without(self, done: Set[str]) -> "EncodedPrompts":
        """The prompts whose ids are not among `done`; none of them is skipped."""
        pairs = zip(self.prompts, self.token_ids, strict=True)
        left = [(prompt, ids) for prompt, ids in pairs if prompt.question_id not in done]
        return replace(
            self,
            prompts=tuple(prompt for prompt, _ in left),
            token_ids=tuple(ids for _, ids in left),
            skipped=(),
        )


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
        prompts = [*read_prompt_files(SHIPPED_PROMPTS), *_code_prompts()]
    else:
        prompts = read_prompt_files(resolve_path(path))
    prompts = _of_domains(prompts, domains)
    return prompts if max_prompts is None else _balanced(prompts, max_prompts, seed)


def first_turns(prompts: Sequence[Prompt]) -> list[Prompt]:
    """The prompts without their later turns."""
    return [replace(prompt, turns=prompt.turns[:1]) for prompt in prompts]


def encode_prompt(
    prompt: Prompt,
    tokenizer: ChatTokenizer,
    *,
    answers: Sequence[str] = (),
    thinking: bool | None = None,
) -> tuple[int, ...]:
    """Token ids that the model is given at the turn behind so many answers.

    `chat` goes through the model's template, with the opening of the assistant's turn;
    `completion` is all texts in a row, behind what the tokenizer's rule puts before a text.

    Args:
        prompt: has a turn more than there are answers, at least.
        tokenizer: of the model.
        answers: texts of the turns before.
        thinking: `enable_thinking` of the template; None leaves it alone.

    Raises:
        ConfigError: there is no chat template, or it refuses the conversation.
    """
    said = prompt.turns[: len(answers) + 1]
    assert len(said) > len(answers), f"{prompt.question_id} has no turn behind {len(answers)}"
    if prompt.format == "completion":
        pairs = zip_longest(said, answers, fillvalue="")
        text = "".join(f"{ours}{theirs}" for ours, theirs in pairs)
        return completion_ids(text, tokenizer)
    if tokenizer.chat_template is None:
        raise ConfigError(
            f"prompt {prompt.question_id} has format chat, but the model's tokenizer has no chat "
            "template; choose prompts with format completion (prompts.path) or a chat model."
        )
    messages = [] if prompt.system is None else [{"role": "system", "content": prompt.system}]
    for ours, theirs in zip_longest(said, answers):
        messages.append({"role": "user", "content": ours})
        messages += [] if theirs is None else [{"role": "assistant", "content": theirs}]
    variables = {} if thinking is None else {"enable_thinking": thinking}
    try:
        return chat_ids(messages, tokenizer, **variables)
    except ConfigError as fault:
        raise ConfigError(
            f"the chat template refuses prompt {prompt.question_id} ({fault.__cause__}); put "
            "a system text into the user's turn, ask first turns alone (prompts.turns=first), or "
            "choose other prompts (prompts.path)."
        ) from None


def encode_prompts(
    prompts: Sequence[Prompt],
    tokenizer: ChatTokenizer,
    *,
    max_model_len: int,
    thinking: bool | None = None,
    thinking_markers: Sequence[str] | None = None,
) -> EncodedPrompts:
    """Token ids of first turns; prompts that leave no room for a token are skipped and counted.

    Raises:
        ConfigError: `thinking` is asked for, and no prompt goes through a template that knows it;
            a marker that was asked for is not one token.
        IntegrityError: none fits.
    """
    _check_thinking(prompts, tokenizer, thinking=thinking)
    token_ids = tuple(encode_prompt(prompt, tokenizer, thinking=thinking) for prompt in prompts)
    pairs = zip(prompts, token_ids, strict=True)
    skipped = tuple(prompt.question_id for prompt, ids in pairs if len(ids) >= max_model_len)
    if len(skipped) == len(prompts):
        raise IntegrityError(
            f"all {len(prompts)} prompts have {max_model_len} tokens or more, the context length; "
            "use shorter prompts or raise engine.max_model_len."
        )
    markers = _thinking_token_ids(tokenizer, thinking_markers)
    fitting = EncodedPrompts(tuple(prompts), token_ids, (), markers).without(set(skipped))
    return replace(fitting, skipped=skipped)


def _check_thinking(
    prompts: Sequence[Prompt], tokenizer: ChatTokenizer, *, thinking: bool | None
) -> None:
    if thinking is None:
        return
    reason = None
    if all(prompt.format == "completion" for prompt in prompts):
        reason = "every prompt has format completion, which no chat template sees"
    elif not re.search(r"\benable_thinking\b", str(tokenizer.chat_template)):
        reason = "the chat template of the model's tokenizer does not know enable_thinking"
    if reason is not None:
        raise ConfigError(
            f"prompts.thinking must be null, because {reason}, got {str(thinking).lower()}; "
            "set prompts.thinking=null."
        )


def _thinking_token_ids(
    tokenizer: ChatTokenizer, markers: Sequence[str] | None
) -> tuple[int, int] | None:
    """Ids of the markers; None where the usual ones are not one token each."""
    begin, end = (
        tokenizer.encode(marker, add_special_tokens=False) for marker in markers or THINKING_MARKERS
    )
    if len(begin) == len(end) == 1 and begin != end:
        return begin[0], end[0]
    if markers is None:
        return None
    raise ConfigError(
        f"prompts.thinking_markers must be two different tokens, got {list(markers)}, which are "
        f"{len(begin)} and {len(end)} tokens; set prompts.thinking_markers=null."
    )


def _of_domains(prompts: Sequence[Prompt], domains: Sequence[str]) -> list[Prompt]:
    known = {prompt.category for prompt in prompts}
    if unknown := sorted(set(domains) - known):
        raise ConfigError(
            f"prompts.domains must be among {', '.join(sorted(known))}, got {', '.join(unknown)}; "
            "leave it out for all of them."
        )
    return [prompt for prompt in prompts if not domains or prompt.category in domains]


@functools.cache  # a process has one standard library, and reading it takes a third of a second
def _code_prompts() -> tuple[Prompt, ...]:
    cuts = cut_code(HELD_OUT_STDLIB, num_prompts=NUM_CODE_PROMPTS, seed=CODE_SEED)
    return tuple(Prompt(origin, CODE_CATEGORY, (text,), "completion") for origin, text in cuts)


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
