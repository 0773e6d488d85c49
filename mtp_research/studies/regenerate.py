"""Training text for heads: the target's own answers, through our decode loop.

    python -m mtp_research.studies.regenerate --target assets/lab_tiny/target
        --output answers.jsonl --source questions.jsonl
        --max-prompts 800 --self-chat 2000 --self-text 800 --temperature 0

Heads trained on anything but the target's own output learn a distribution they are never asked for.
Questions come from data sets (`data.conversations` lists the forms), or from the target itself:
`--self-chat` lets it invent a user message and then answers it, `--self-text` lets it begin a
document and then goes on. Seeds make every task repeatable, whatever else is decoded with it. A
line holds token ids, so that encoding again cannot change the trajectory. Killed runs resume behind
the last whole line: ids that the output already has are not made again, and `OUTPUT.settings.json`
keeps a run with other settings from mixing its answers in. Under torchrun every process decodes
its share on a GPU of its own; the lines are the same for any number of them.
"""

import argparse
import glob
import json
import lzma
import os
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar, cast

import torch
import torch.distributed as dist
from jinja2 import TemplateError

from mtp_research.config.schema import EngineConfig
from mtp_research.data.conversations import Question, read_questions
from mtp_research.data.prompt_text import ChatTokenizer, begin_of_text
from mtp_research.decode.decoder import SpecDecoder
from mtp_research.decode.sampling.sampling_params import SamplingParams
from mtp_research.decode.settings import SpecSettings
from mtp_research.models.loading.placement import num_ranks
from mtp_research.models.target import Target, load_target, load_tokenizer, target_hashes
from mtp_research.runtime.errors import ConfigError, EnvironmentFault, IntegrityError
from mtp_research.runtime.progress import WorkProgress
from mtp_research.runtime.provenance import write_error

T = TypeVar("T")
_BEGINNINGS = ("def ", "class ", "import ", "from ", '"""', "#", "The ", "A ", "In ", "I ", "He ")
_MESSAGE_TOKENS, _BEGINNING_TOKENS = 96, 24
_SHORTEST_MESSAGE = 2  # tokens, with the one that ends it
_MARK = "MESSAGE"  # where the template puts a user's message
_SEED_STRIDE = 1_000_003  # keeps the seeds of two runs apart


class SpecialTokenizer(ChatTokenizer, Protocol):
    """A chat tokenizer that also names its special tokens."""

    all_special_ids: list[int]

    def convert_tokens_to_ids(self, tokens: list[str]) -> list[int]:
        """Ids of token names."""
        ...


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of the module; see its docstring."""
    try:
        _run(_parser().parse_args(argv))
    except (ConfigError, IntegrityError, EnvironmentFault) as fault:
        write_error(str(fault))
        return fault.exit_code
    return 0


def _run(args: argparse.Namespace) -> None:
    is_greedy = args.temperature == 0
    sampling = SamplingParams(
        temperature=args.temperature,
        top_k=0 if is_greedy else args.top_k,
        top_p=1.0 if is_greedy else args.top_p,
        seed=args.seed,
        max_new_tokens=args.max_new_tokens,
    )
    questions: list[Question] = []
    for source in args.source:
        found = read_questions(source, field=args.field)
        questions += found[: args.max_prompts]
    if not (questions or args.self_chat or args.self_text):
        raise ConfigError("nothing is asked; set --source, --self-chat or --self-text.")
    share = join_launch(args.device)
    target = load_target(args.target, dtype=args.dtype, device=args.device)
    tokenizer = cast(SpecialTokenizer, load_tokenizer(args.target))  # fields set at run time
    if share.rank == 0:
        _check_settings(args.output, target=target, sampling=sampling)
        gather_parts(args.output)  # of a launch that was killed
    done = share.in_turns(lambda: _existing_ids(args.output))
    engine = _engine(args)
    tasks = share.of(question_tasks(questions, tokenizer)) if questions else []
    invent = partial(_invent, target, tokenizer, share=share, seed=args.seed, engine=engine)
    tasks += invent(self_chat, count=args.self_chat, first_number=len(questions))
    tasks += invent(self_text, count=args.self_text, first_number=len(questions) + args.self_chat)
    sampling = replace(sampling, stop_token_ids=target.stop_token_ids)
    output = part_of(args.output, share.rank)
    answered = answer(target, tasks, output=output, sampling=sampling, engine=engine, done=done)
    answered = Answered(*share.sums(answered))
    share.leave()
    if share.rank == 0:
        gather_parts(args.output)
        if args.xz:
            write_xz(args.output)
        print(
            f"{answered.num_written} of {sum(answered)} documents written to {args.output}, "
            f"{answered.num_there} were there, {answered.num_too_long} prompts fill the context"
        )


def _engine(args: argparse.Namespace) -> EngineConfig:
    """Settings of the loop; with graphs those of `conf/engine/h200.yaml`."""
    common = EngineConfig(
        max_num_requests=args.batch,
        max_num_batched_tokens=max(512, 4 * args.batch),
        max_model_len=args.max_model_len,
        audit=False,
    )
    if not args.graphs:
        return common
    return replace(
        common,
        backend="triton",
        max_num_batched_tokens=8192,
        max_prefill_chunk=2048,
        deferred_output=True,
        cuda_graphs=True,
        compile=True,
        capture_mixed=True,
    )


@dataclass(frozen=True)
class Task:
    """One line to make: the prompt and how it is called."""

    doc_id: str
    domain: str
    prompt: tuple[int, ...]
    number: int = 0  # among all that are asked for: its seed, whichever process decodes it


class Share(NamedTuple):
    """Which of the processes of torchrun this is; they deal the tasks out among themselves."""

    rank: int = 0
    num_ranks: int = 1

    def of(self, tasks: Sequence[T]) -> list[T]:
        """Every n-th task."""
        return list(tasks[self.rank :: self.num_ranks])

    def in_turns(self, read: Callable[[], T]) -> T:
        """What `read` gives, the first process before the others; all leave together."""
        if self.rank > 0:
            self._wait()
            found = read()
        else:
            found = read()
            self._wait()
        self._wait()
        return found

    def sums(self, counts: Sequence[int]) -> list[int]:
        """The counts added up over the processes, once all of them are here."""
        total = torch.tensor(counts)
        if self.num_ranks > 1:
            dist.all_reduce(total)
        return total.tolist()

    def leave(self) -> None:
        """End the group, which must not outlive the process."""
        if self.num_ranks > 1:
            dist.destroy_process_group()

    def _wait(self) -> None:
        if self.num_ranks > 1:
            dist.barrier()


def join_launch(device: str) -> Share:
    """This process's share under torchrun, on a GPU of its own where there are; else everything."""
    share = Share(int(os.environ.get("RANK", "0")), num_ranks())
    if share.num_ranks > 1:
        dist.init_process_group("gloo")  # a few counts and barriers
        if device != "cpu" and torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    return share


def part_of(output: Path, rank: int) -> Path:
    """The file of one process: the first writes the output itself."""
    return output if rank == 0 else output.with_name(f"{output.name}.rank{rank}")


def gather_parts(output: Path) -> None:
    """Append the whole lines of the other processes' files to the output, and remove them."""
    for part in sorted(output.parent.glob(f"{glob.escape(output.name)}.rank*")):
        _existing_ids(output)  # cuts off a line that a kill left unfinished
        lines = part.read_text(encoding="utf8").splitlines(keepends=True)
        with output.open("a", encoding="utf8") as file:
            file.writelines(line for line in lines if line.endswith("\n"))
        part.unlink()


def question_tasks(questions: Sequence[Question], tokenizer: ChatTokenizer) -> list[Task]:
    """Conversations in the target's chat template, up to where the assistant speaks."""
    if tokenizer.chat_template is None:
        raise ConfigError(
            "--source needs a target whose tokenizer has a chat template, this one has none; use "
            "--self-text or a chat model."
        )
    tasks = []
    for number, question in enumerate(questions):
        messages = [{"role": role, "content": content} for role, content in question.messages]
        try:
            token_ids = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=True, return_dict=False
            )
        except TemplateError as fault:
            raise ConfigError(
                f"the chat template refuses {question.doc_id} ({fault}); leave it out of --source."
            ) from fault
        tasks.append(Task(question.doc_id, question.domain, tuple(token_ids), number))
    return tasks


class Invention(NamedTuple):
    """What the target invents: its beginnings, and what becomes of the words that follow."""

    openings: Callable[[int], tuple[int, ...]]  # by number
    sampling: SamplingParams
    task: Callable[[int, tuple[int, ...]], Task | None]  # by number and words; None: not of use


def _invent(
    target: Target,
    tokenizer: "SpecialTokenizer",
    kind: Callable[["SpecialTokenizer", int], Invention],
    *,
    count: int,
    first_number: int,
    share: Share,
    seed: int,
    engine: EngineConfig,
) -> list[Task]:
    """This process's share of `count` tasks that the target invents."""
    if not count:
        return []
    invention = kind(tokenizer, seed)
    decoder = SpecDecoder(target, spec=SpecSettings(num_speculative_tokens=0), engine=engine)
    own = share.of(range(count))
    for index in own:
        drawn = replace(invention.sampling, seed=seed * _SEED_STRIDE + index)
        decoder.add_request(invention.openings(index), sampling=drawn, request_id=str(index))
    stats = decoder.stats
    with WorkProgress("asking the target", total=len(own), unit="prompts") as progress:
        while decoder.has_work:
            decoder.step()
            progress.done(len(stats.records))
    words = {int(record.request_id): record.output_token_ids for record in decoder.stats.records}
    tasks = [invention.task(index, words[index]) for index in sorted(words)]
    return [replace(task, number=first_number + task.number) for task in tasks if task is not None]


def self_chat(tokenizer: "SpecialTokenizer", seed: int) -> Invention:
    """Prompts whose user message the target invents, sampled at temperature 1 and top-p 0.95."""
    turn = user_turn(tokenizer)
    sampling = SamplingParams(
        temperature=1.0, top_p=0.95, max_new_tokens=_MESSAGE_TOKENS, stop_token_ids=(turn.end,)
    )

    def task(index: int, words: tuple[int, ...]) -> Task | None:
        if len(words) < _SHORTEST_MESSAGE or words[-1] != turn.end:
            return None
        prompt = (*turn.opening, *words[:-1], *turn.closing)
        return Task(f"self-chat:{seed}:{index}", "chat", prompt, index)

    return Invention(lambda _: turn.opening, sampling, task)


class UserTurn(NamedTuple):
    """How the chat template writes a user's message, as token ids."""

    opening: tuple[int, ...]  # before it
    end: int  # the special token behind it
    closing: tuple[int, ...]  # what follows it, that token first, up to where the assistant speaks


def user_turn(tokenizer: SpecialTokenizer) -> UserTurn:
    """The turn in a conversation that begins with it; `ConfigError` where its end is plain text."""
    message = [{"role": "user", "content": _MARK}]
    text = tokenizer.chat_template and tokenizer.apply_chat_template(
        message, add_generation_prompt=True, tokenize=False, return_dict=False
    )
    before, _, after = str(text or "").partition(_MARK)
    opening, closing = (
        tuple(tokenizer.encode(part, add_special_tokens=False)) for part in (before, after)
    )
    if not closing or closing[0] not in tokenizer.all_special_ids:
        raise ConfigError(
            "--self-chat needs a chat template that ends the user's turn with a special token, got "
            f"{after[:20]!r} behind it; set --source."
        )
    return UserTurn(opening, closing[0], closing)


def self_text(tokenizer: SpecialTokenizer, seed: int) -> Invention:
    """Beginnings of documents that the target continues from one of a few first words."""
    first_words = [tokenizer.encode(text, add_special_tokens=False) for text in _BEGINNINGS]
    begin, special = begin_of_text(tokenizer), set(tokenizer.all_special_ids)
    sampling = SamplingParams(temperature=1.0, top_p=0.95, max_new_tokens=_BEGINNING_TOKENS)

    def opening(index: int) -> tuple[int, ...]:
        return (*begin, *first_words[index % len(first_words)])

    def task(index: int, words: tuple[int, ...]) -> Task | None:
        if special & set(words):
            return None
        return Task(f"self-text:{seed}:{index}", "text", (*opening(index), *words), index)

    return Invention(opening, sampling, task)


class Answered(NamedTuple):
    """What became of the tasks of one call."""

    num_written: int  # lines appended
    num_there: int  # tasks that the output held before
    num_too_long: int  # prompts that leave no room for a token


def answer(
    target: Target,
    tasks: Sequence[Task],
    *,
    output: Path,
    sampling: SamplingParams,
    engine: EngineConfig | None = None,
    done: Set[str] = frozenset(),
) -> Answered:
    """Append the target's continuation of every task that is not `done` to `output`.

    Lines are `id`, `domain`, `token_ids`, `num_prompt_tokens`. Prompts as long as the context are
    left out and counted; the seed of `sampling` is shifted by the task's number.
    """
    decoder = SpecDecoder(target, spec=SpecSettings(num_speculative_tokens=0), engine=engine)
    by_id = {task.doc_id: task for task in tasks}
    num_there = num_too_long = num_written = 0
    for task in tasks:
        if task.doc_id in done:
            num_there += 1
        elif len(task.prompt) >= decoder.max_model_len:
            num_too_long += 1
        else:
            params = replace(sampling, seed=(sampling.seed or 0) + task.number)
            decoder.add_request(task.prompt, sampling=params, request_id=task.doc_id)
    progress = WorkProgress(
        "answers", total=len(tasks) - num_too_long, unit="documents", first=num_there
    )
    with output.open("a", encoding="utf8") as file, progress:
        while decoder.has_work:
            decoder.step()
            for record in decoder.stats.records[num_written:]:
                task = by_id[record.request_id]
                line = {
                    "id": task.doc_id,
                    "domain": task.domain,
                    "token_ids": [*task.prompt, *record.output_token_ids],
                    "num_prompt_tokens": len(task.prompt),
                }
                file.write(json.dumps(line, separators=(",", ":")) + "\n")
                num_written += 1
            file.flush()
            progress.done(num_there + num_written)
    return Answered(num_written, num_there, num_too_long)


def write_xz(output: Path) -> None:
    """Write `OUTPUT.xz`, ordered by id: the same bytes in whatever order requests finished."""
    lines = output.read_text(encoding="utf8").splitlines(keepends=True)
    ordered = sorted(lines, key=lambda line: json.loads(line)["id"])
    packed = lzma.compress("".join(ordered).encode(), preset=9)
    output.with_name(f"{output.name}.xz").write_bytes(packed)


def _existing_ids(output: Path) -> set[str]:
    """Ids in the file; a last line cut off by a kill is removed."""
    if not output.is_file():
        return set()
    lines = output.read_text(encoding="utf8").splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        lines.pop()
        output.write_text("".join(lines), encoding="utf8")
    return {record["id"] for record in _parse(lines, output)}


def _parse(lines: Sequence[str], path: Path) -> Iterator[dict]:
    for number, line in enumerate(lines, start=1):
        try:
            yield json.loads(line)
        except json.JSONDecodeError as fault:
            raise IntegrityError(
                f"{path}:{number}: invalid JSON ({fault.msg}); remove the line or the file."
            ) from fault


def _check_settings(output: Path, *, target: Target, sampling: SamplingParams) -> None:
    """Refuse to go on with answers of another target or of other settings; else record them."""
    path = output.with_name(f"{output.name}.settings.json")
    names = ("temperature", "top_k", "top_p", "seed", "max_new_tokens")
    settings = target_hashes(target) | {name: getattr(sampling, name) for name in names}
    if output.is_file() and path.is_file():
        try:
            saved = json.loads(path.read_text(encoding="utf8"))
        except ValueError as fault:
            raise IntegrityError(f"{path}: damaged ({fault}); remove it and {output}.") from fault
        changed = [key for key, value in settings.items() if saved.get(key) != value]
        if changed:
            listed = "; ".join(f"{key} {saved.get(key)}, now {settings[key]}" for key in changed)
            raise ConfigError(
                f"--output {output} holds answers with other settings ({listed}); "
                "choose another --output or set them back."
            )
    output.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(settings, indent=1) + "\n", encoding="utf8")


def _parser() -> argparse.ArgumentParser:
    about = "Answers of the target as training text."
    name = "python -m mtp_research.studies.regenerate"
    parser = argparse.ArgumentParser(prog=name, description=about)
    add = parser.add_argument
    add("--target", required=True, help="folder or hub id of the target")
    add("--output", type=Path, required=True, help="JSONL file, appended to")
    sources = "questions: a file, a folder, or NAME[:CONFIG][@SPLIT] on the hub; may be repeated"
    add("--source", action="append", default=[], help=sources)
    add("--field", help="of the conversation in a row; left out: the first known")
    add("--max-prompts", type=int, default=None, help="per source")
    add("--self-chat", type=int, default=0, help="user messages that the target invents")
    add("--self-text", type=int, default=0, help="documents that the target begins")
    add("--temperature", type=float, default=0.6, help="0 is greedy")
    add("--top-p", type=float, default=0.95, help="not read at temperature 0")
    add("--top-k", type=int, default=20, help="not read at temperature 0")
    add("--max-new-tokens", type=int, default=96)
    add("--batch", type=int, default=32, help="requests decoded at once")
    most = "tokens of prompt and answer; default: what the target can"
    add("--max-model-len", type=int, help=most)
    add("--graphs", action="store_true", help="steps compiled and captured, as engine=h200")
    add("--dtype", default="auto")
    add("--device", default="auto")
    add("--seed", type=int, default=0)
    add("--xz", action="store_true", help="also write OUTPUT.xz, lines sorted by id")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
