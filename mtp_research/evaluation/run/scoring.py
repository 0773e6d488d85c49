"""Whether answers are right, so that a lossy verification rule has a price.

Between decode loop and statistics. What an answer is held against comes with the prompt, see
`Prompt.reference`; prompts of several turns and prompts without a reference have no score.

    exact   `answer` or `reference` holds `#### N`: N is the number behind the answer's own `####`,
            else its last number
    tests   `test`, `entry_point` and `prompt` (HumanEval): the function passes its tests

Tests run code that a model wrote. It runs in a process of its own with little time, little memory,
an empty folder and, where Linux lets it, no network, but with this user's rights: a limit for
accidents, not a wall against an attack. It is never run unless `prompts.run_code` says so.
"""

import contextlib
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Literal, NamedTuple

from mtp_research.decode.stats import RequestRecord
from mtp_research.evaluation.run.conversations import Conversations
from mtp_research.evaluation.run.prompt_files import Prompt
from mtp_research.evaluation.stats.statistics import FINISHED
from mtp_research.runtime.errors import ConfigError

Kind = Literal["exact", "tests"]

_NUMBER = re.compile(
    r"(?:(?<![\w.)\]])-\$?)?"  # a sign, where it cannot stand between two values
    r"(?<![A-Za-z0-9_])(?<![0-9]\.)"  # no tail of a word or of another number
    r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])(?:\.[0-9]+)?|[0-9]+(?:\.[0-9]+)?|(?<!\.)\.[0-9]+)"
)
_MARK = "####"
_FENCE = re.compile(r"```[^\n`]*\n(.*?)(?:\n[ \t]*```|\Z)", re.DOTALL)
# A line at the left edge ends the function that a completion goes on with; brackets close a value.
_NEXT_STATEMENT = re.compile(r"\n(?=[^\s)\]}])")


class Limits(NamedTuple):
    """What one run of tests may take."""

    wall_s: float = 20.0
    cpu_s: int = 10
    memory_bytes: int = 1 << 30  # of address space
    file_bytes: int = 1 << 20  # of each file that it writes


# Runs in the child, before the code: limits that it cannot raise again. The word that says that the
# tests passed comes on a channel of its own, so that code that ends the process early has failed.
_CHILD = """
import ctypes, json, os, resource, sys
asked = json.load(sys.stdin)
channel = os.dup(1)
nowhere = os.open(os.devnull, os.O_RDWR)
for number in (0, 1, 2):
    os.dup2(nowhere, number)
try:  # a network of its own, which has no device
    ctypes.CDLL(None).unshare(0x10000000 | 0x40000000)
except (OSError, AttributeError):
    pass
for name, most in asked["limits"].items():
    resource.setrlimit(getattr(resource, name), (most, most))
names = {"__name__": "answer"}
exec(compile(asked.pop("source"), "answer.py", "exec"), names)
os.write(channel, asked["word"].encode())
os._exit(0)
"""


class Scorer:
    """Scores the answers of conditions; equal answers to a prompt are scored once.

    Args:
        conversations: the prompts, and texts of answers.
        score: `prompts.score`, None for no scores.
        run_code: whether tests may be run.

    Raises:
        ConfigError: no prompt can be scored so.
    """

    def __init__(
        self, conversations: Conversations, *, score: str | None, run_code: bool = False
    ) -> None:
        self._conversations = conversations
        self._opened = {
            one.question_id for one in conversations.encoded.entries if one.opens_thinking
        }
        self._known: dict[tuple[str, str], int] = {}
        self._kinds: dict[str, tuple[Prompt, Kind]] = {}
        for prompt in conversations.encoded.prompts if score else ():
            kind = kind_of(prompt)
            if kind is not None and score in ("auto", kind) and (run_code or kind != "tests"):
                self._kinds[prompt.question_id] = (prompt, kind)
        if score and not self._kinds:
            raise ConfigError(
                f"prompts.score={score} needs prompts of one turn that come with `#### N` in "
                "answer or reference, or with test and entry_point and prompts.run_code=true, got "
                f"none among {len(conversations.encoded.prompts)}; set prompts.score=null."
            )

    @property
    def runs_code(self) -> bool:
        """Whether code that the model wrote will be run."""
        return any(kind == "tests" for _, kind in self._kinds.values())

    def scores(self, records: Sequence[RequestRecord]) -> dict[str, int] | None:
        """1 or 0 by prompt's id, for prompts that finished; None without scores."""
        if not self._kinds:
            return None
        return {
            record.request_id: self._score(record)
            for record in records
            if record.request_id in self._kinds and record.finish_reason in FINISHED
        }

    def _score(self, record: RequestRecord) -> int:
        prompt, kind = self._kinds[record.request_id]
        is_open = record.request_id in self._opened
        answer = self._conversations.answer(record, is_open=is_open)
        key = (record.request_id, answer)
        if key not in self._known:
            if kind == "exact":
                is_right = final_number(answer) == _expected(prompt.reference)
            else:
                is_right = passes_tests(program(prompt, answer))
            self._known[key] = int(is_right)
        return self._known[key]


def kind_of(prompt: Prompt) -> Kind | None:
    """How answers to a prompt can be scored; None if they cannot."""
    if len(prompt.turns) > 1:
        return None
    if all(isinstance(prompt.reference.get(name), str) for name in ("test", "entry_point")):
        return "tests"
    return None if _expected(prompt.reference) is None else "exact"


def _expected(reference: Mapping[str, object]) -> Decimal | None:
    for name in ("answer", "reference"):
        found = reference.get(name)
        text = found[0] if isinstance(found, list | tuple) and found else found
        if isinstance(text, str) and _MARK in text:
            return final_number(text)
    return None


def final_number(text: str) -> Decimal | None:
    """The number behind the last `####`, else the last number of a text; None without one.

    Thousands may have commas; a sign counts where it cannot be a minus between two values.
    """
    text = text.replace("\u2212", "-")
    _, mark, tail = text.rpartition(_MARK)
    behind = _NUMBER.findall(tail) if mark else []
    numbers = behind[:1] or _NUMBER.findall(text)[-1:]
    return Decimal(re.sub("[,$]", "", numbers[0])) if numbers else None


def program(prompt: Prompt, answer: str) -> str:
    """The function with its tests, as one source.

    A completion goes on where the prompt ends, up to the next statement at the left edge. Of a chat
    answer the first fenced block counts, or all of it without one: a block that defines the
    function stands behind what the prompt has before it (imports, helpers), any other goes on with
    the prompt.
    """
    reference = prompt.reference
    entry, test = str(reference["entry_point"]), str(reference["test"])
    begun = str(reference.get("prompt") or prompt.turns[0])
    define = re.compile(rf"^[ \t]*(?:async[ \t]+)?def[ \t]+{re.escape(entry)}\b", re.MULTILINE)
    code = answer
    if prompt.format == "chat" and (fence := _FENCE.search(answer)):
        code = fence[1]
    if prompt.format == "chat" and define.search(code):
        places = [found.start() for found in define.finditer(begun)]
        source = f"{begun[: places[-1]] if places else ''}\n{code}"
    else:
        source = begun + _NEXT_STATEMENT.split(code, maxsplit=1)[0]
    return f"{source}\n\n{test}\n\ncheck({entry})\n"


def passes_tests(source: str, limits: Limits | None = None) -> bool:
    """Run a source in a process with limits; whether it came to its end."""
    limits, word = limits or Limits(), secrets.token_hex(16)
    bounds = {
        "RLIMIT_CPU": limits.cpu_s,
        "RLIMIT_AS": limits.memory_bytes,
        "RLIMIT_FSIZE": limits.file_bytes,
        "RLIMIT_CORE": 0,
    }
    asked = json.dumps({"source": source, "word": word, "limits": bounds}).encode()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        child = subprocess.Popen(
            [sys.executable, "-I", "-X", "utf8", "-c", _CHILD],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={},
            start_new_session=True,
        )
        try:
            said, _ = child.communicate(asked, timeout=limits.wall_s)
        except subprocess.TimeoutExpired:
            said = b""
        finally:
            _end(child)
    return said == word.encode()


def _end(child: subprocess.Popen[bytes]) -> None:
    """Kill the process and what it has started in its session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    for pipe in (child.stdin, child.stdout):
        with contextlib.suppress(OSError):
            if pipe is not None:
                pipe.close()
