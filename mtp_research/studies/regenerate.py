"""Training text for heads: the target's own answers, through our decode loop.

    python -m mtp_research.studies.regenerate --target assets/lab_tiny/target
        --output answers.jsonl --source ../shared/data/corpus/arith.train.jsonl.xz
        --max-prompts 800 --self-chat 2000 --self-text 800 --temperature 0

Heads trained on anything but the target's own output learn a distribution they are never asked for.
Questions come from data sets (`data.questions` lists the forms), or from the target itself:
`--self-chat` lets it invent a user message and then answers it, `--self-text` lets it begin a
document and then goes on. Seeds make every task repeatable, whatever else is decoded with it. A
line holds token ids, so that encoding again cannot change the trajectory. Killed runs resume behind
the last whole line: ids that the output already has are not made again, and `OUTPUT.settings.json`
keeps a run with other settings from mixing its answers in.
"""

import argparse
import json
import lzma
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, Protocol, cast

from jinja2 import TemplateError

from mtp_research.config.schema import EngineConfig
from mtp_research.data.questions import Question, read_questions
from mtp_research.decode.decoder import SpecDecoder
from mtp_research.decode.sampling.sampling_params import SamplingParams
from mtp_research.decode.settings import SpecSettings
from mtp_research.evaluation.run.prompts import ChatTokenizer, begin_of_text
from mtp_research.models.target import Target, load_target, load_tokenizer, target_hashes
from mtp_research.runtime.errors import ConfigError, EnvironmentFault, IntegrityError
from mtp_research.runtime.progress import WorkProgress
from mtp_research.runtime.provenance import write_error

_BEGINNINGS = ("def ", "class ", "import ", "from ", '"""', "#", "The ", "A ", "In ", "I ", "He ")
_MESSAGE_TOKENS, _BEGINNING_TOKENS = 96, 24
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
        found = read_questions(source, field=args.field, split=args.split)
        questions += found[: args.max_prompts]
    target = load_target(args.target, dtype=args.dtype, device=args.device)
    tokenizer = cast(SpecialTokenizer, load_tokenizer(args.target))  # fields set at run time
    _check_settings(args.output, target=target, sampling=sampling)
    engine = EngineConfig(
        max_num_requests=args.batch,
        max_num_batched_tokens=max(512, 4 * args.batch),
        max_model_len=args.max_model_len,
        deferred_output=args.graphs,
        cuda_graphs=args.graphs,
        audit=False,
    )
    tasks = question_tasks(questions, tokenizer) if questions else []
    tasks += self_chat_tasks(target, tokenizer, count=args.self_chat, seed=args.seed, engine=engine)
    tasks += self_text_tasks(target, tokenizer, count=args.self_text, seed=args.seed, engine=engine)
    if not tasks:
        raise ConfigError("nothing is asked; set --source, --self-chat or --self-text.")
    sampling = replace(sampling, stop_token_ids=target.stop_token_ids)
    answered = answer(target, tasks, output=args.output, sampling=sampling, engine=engine)
    if args.xz:
        write_xz(args.output)
    print(
        f"{answered.num_written} of {len(tasks)} documents written to {args.output}, "
        f"{answered.num_there} were there, {answered.num_too_long} prompts fill the context"
    )


@dataclass(frozen=True)
class Task:
    """One line to make: the prompt and how it is called."""

    doc_id: str
    domain: str
    prompt: tuple[int, ...]


def question_tasks(questions: Sequence[Question], tokenizer: ChatTokenizer) -> list[Task]:
    """Conversations in the target's chat template, up to where the assistant speaks."""
    if tokenizer.chat_template is None:
        raise ConfigError(
            "--source needs a target whose tokenizer has a chat template, this one has none; use "
            "--self-text or a chat model."
        )
    tasks = []
    for question in questions:
        messages = [{"role": role, "content": content} for role, content in question.messages]
        try:
            token_ids = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=True, return_dict=False
            )
        except TemplateError as fault:
            raise ConfigError(
                f"the chat template refuses {question.doc_id} ({fault}); leave it out of --source."
            ) from fault
        tasks.append(Task(question.doc_id, question.domain, tuple(token_ids)))
    return tasks


def self_chat_tasks(
    target: Target, tokenizer: SpecialTokenizer, *, count: int, seed: int, engine: EngineConfig
) -> list[Task]:
    """Prompts whose user message the target invents, sampled at temperature 1 and top-p 0.95."""
    user, assistant, end = tokenizer.convert_tokens_to_ids(["<|user|>", "<|assistant|>", "<|end|>"])
    opening = (*begin_of_text(tokenizer), user)
    sampling = SamplingParams(
        temperature=1.0, top_p=0.95, max_new_tokens=_MESSAGE_TOKENS, stop_token_ids=(end,)
    )
    messages = _sample(target, [opening] * count, sampling=sampling, seed=seed, engine=engine)
    return [
        Task(f"self-chat:{seed}:{index}", "chat", (*opening, *message, assistant))
        for index, message in enumerate(messages)
        if len(message) > 1 and message[-1] == end
    ]


def self_text_tasks(
    target: Target, tokenizer: SpecialTokenizer, *, count: int, seed: int, engine: EngineConfig
) -> list[Task]:
    """Beginnings of documents that the target continues from one of a few first words."""
    words = [tokenizer.encode(text, add_special_tokens=False) for text in _BEGINNINGS]
    begin = begin_of_text(tokenizer)
    openings = [(*begin, *words[index % len(words)]) for index in range(count)]
    sampling = SamplingParams(temperature=1.0, top_p=0.95, max_new_tokens=_BEGINNING_TOKENS)
    beginnings = _sample(target, openings, sampling=sampling, seed=seed, engine=engine)
    special = set(tokenizer.all_special_ids)
    return [
        Task(f"self-text:{seed}:{index}", "text", (*opening, *beginning))
        for index, (opening, beginning) in enumerate(zip(openings, beginnings, strict=True))
        if not special & set(beginning)
    ]


def _sample(
    target: Target,
    prompts: Sequence[tuple[int, ...]],
    *,
    sampling: SamplingParams,
    seed: int,
    engine: EngineConfig,
) -> list[tuple[int, ...]]:
    decoder = SpecDecoder(target, spec=SpecSettings(num_speculative_tokens=0), engine=engine)
    for index, prompt in enumerate(prompts):
        params = replace(sampling, seed=(sampling.seed or 0) + seed * _SEED_STRIDE + index)
        decoder.add_request(prompt, sampling=params, request_id=str(index))
    stats = decoder.stats
    with WorkProgress("asking the target", total=len(prompts), unit="prompts") as progress:
        while decoder.has_work:
            decoder.step()
            progress.done(len(stats.records))
    records = sorted(decoder.stats.records, key=lambda record: int(record.request_id))
    return [record.output_token_ids for record in records]


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
) -> Answered:
    """Append the target's continuation of every task that `output` does not hold yet.

    Lines are `id`, `domain`, `token_ids`, `num_prompt_tokens`. Prompts as long as the context are
    left out and counted; the seed of `sampling` is shifted by the task's index.
    """
    done = _existing_ids(output)
    decoder = SpecDecoder(target, spec=SpecSettings(num_speculative_tokens=0), engine=engine)
    by_id = {task.doc_id: task for task in tasks}
    num_there = num_too_long = num_written = 0
    for index, task in enumerate(tasks):
        if task.doc_id in done:
            num_there += 1
        elif len(task.prompt) >= decoder.max_model_len:
            num_too_long += 1
        else:
            params = replace(sampling, seed=(sampling.seed or 0) + index)
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
    sources = "questions: a JSONL file, or a folder or name that `datasets` reads; may be repeated"
    add("--source", action="append", default=[], help=sources)
    add("--field", help="of the conversation in a row; left out: the first known")
    add("--split", default="train", help="of a `datasets` source")
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
    add("--graphs", action="store_true", help="replay decode steps as CUDA graphs; a GPU")
    add("--dtype", default="auto")
    add("--device", default="auto")
    add("--seed", type=int, default=0)
    add("--xz", action="store_true", help="also write OUTPUT.xz, lines sorted by id")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
