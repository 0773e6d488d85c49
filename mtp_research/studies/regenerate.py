"""Training text for heads: the target's own answers, through our decode loop.

    mtp regenerate --target assets/lab_tiny/target
        --output answers.jsonl --source questions.jsonl
        --max-prompts 800 --self-chat 2000 --self-text 800 --temperature 0

Heads trained on anything but the target's own output learn a distribution they are never asked for.
Questions come from data sets (`data.row_forms` lists the forms), or from the target itself:
`--self-chat` lets it invent a user message and then answers it, `--self-text` lets it begin a
document and then goes on. Seeds make every task repeatable, whatever else is decoded with it. A
line holds token ids, so that encoding again cannot change the trajectory. Killed runs resume behind
the last whole line: ids that the output already has are not made again, and `OUTPUT.settings.json`
keeps a run with other settings from mixing its answers in. Under torchrun every process decodes
its share on a GPU of its own; the lines are the same for any number of them. On a GPU whole steps
are compiled and captured, where the target's family allows it. With `--endpoint URL` a server of
OpenAI's API answers instead (`studies.endpoint`), and no layer of the target is loaded.
"""

import argparse
import glob
import json
import lzma
import sys
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, cast

from mtp_research.config.ranges import in_own_words
from mtp_research.config.schema import WEIGHTS, EngineConfig
from mtp_research.data.row_forms import Question, read_questions
from mtp_research.data.server import find_server
from mtp_research.decode.decoder import SpecDecoder
from mtp_research.decode.graphs.capture import require_capturable_target
from mtp_research.decode.graphs.mixed_graphs import MIXED_ROWS, pays_captured
from mtp_research.decode.sampling.sampling_params import SamplingParams
from mtp_research.decode.settings import SpecSettings
from mtp_research.models.loading.placement import num_ranks
from mtp_research.models.target import Target, load_target, load_tokenizer, target_hashes
from mtp_research.runtime.compiling import old_objects_kept
from mtp_research.runtime.errors import (
    ConfigError,
    EnvironmentFault,
    IntegrityError,
    Interrupted,
    stopped_by_signals,
)
from mtp_research.runtime.options import OptionParser, positive
from mtp_research.runtime.progress import WorkProgress
from mtp_research.runtime.provenance import write_error
from mtp_research.studies.answer_tasks import (
    Answered,
    Evaluated,
    SpecialTokenizer,
    Task,
    invent,
    join_launch,
    question_tasks,
    self_chat,
    self_text,
    sort_out,
)
from mtp_research.studies.endpoint import OPTIONS, Reader, answer_by_server

# What loaders and samplers call it, by what this command does.
_OPTIONS = {
    "engine.max_num_requests": "--batch",
    "engine.max_model_len": "--max-model-len",
    "model.device": "--device",
    "model.dtype": "--dtype",
    "model.path": "--target",
    "sampling.max_new_tokens": "--max-new-tokens",
    "sampling.temperature": "--temperature",
    "sampling.top_k": "--top-k",
    "sampling.top_p": "--top-p",
    "sampling.seed": "--seed",
}
_PLACES_A_TURN = 8  # of a captured batch one in so many is free before prompts are run
# What one way of answering reads and the other does not.
_LOCAL_OPTIONS = ("self_chat", "self_text", "batch", "graphs", "dtype", "device")
_ENDPOINT_OPTIONS = ("served_model", "concurrency", "timeout_s", "api_key_variable")


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of the module; see its docstring."""
    args = _parser().parse_args(argv)
    try:
        _check_mode(args)
        _check_output(args.output, sources=args.source)
        with stopped_by_signals(f"{args.output} keeps its answers, the same command goes on."):
            (_run if args.endpoint is None else _run_endpoint)(args)
    except (ConfigError, IntegrityError, EnvironmentFault, Interrupted) as fault:
        write_error(in_own_words(str(fault), _OPTIONS))
        return fault.exit_code
    return 0


def _check_mode(args: argparse.Namespace) -> None:
    """Refuse options that the way of answering does not read."""
    is_server = args.endpoint is not None
    names = _LOCAL_OPTIONS if is_server else _ENDPOINT_OPTIONS
    unread = [name for name in names if getattr(args, name) != _parser().get_default(name)]
    if unread:
        listed = ", ".join(f"--{name.replace('_', '-')}" for name in unread)
        fix = "leave it out" if is_server else "set --endpoint"
        raise ConfigError(
            f"{listed} must be used {'without' if is_server else 'with'} --endpoint; {fix}."
        )
    if is_server and num_ranks() > 1:
        raise ConfigError(
            f"--endpoint needs one process, got {num_ranks()}; set --concurrency instead."
        )


def _check_output(output: Path, *, sources: Sequence[str]) -> None:
    """Refuse to append answers to anything else; of a file that is there the first line is read."""
    if output.is_dir():
        raise ConfigError(f"--output must be a file, got the folder {output}; name a file.")
    if any(Path(source).resolve() == output.resolve() for source in sources):
        raise ConfigError(f"--output must be another file than --source, got {output} for both.")
    if not output.is_file():
        return
    with output.open(encoding="utf8") as file:
        first = file.readline()
    # A line that a kill cut off is made again; only answers have settings beside them.
    if first.endswith("\n") or (first and not _settings_of(output).is_file()):
        _ids([first], output)


def _sampling(args: argparse.Namespace) -> SamplingParams:
    is_greedy = args.temperature == 0
    return SamplingParams(
        temperature=args.temperature,
        top_k=0 if is_greedy else args.top_k,
        top_p=1.0 if is_greedy else args.top_p,
        seed=args.seed,
        max_new_tokens=args.max_new_tokens,
    )


class _Asked(NamedTuple):
    """What is asked of others' questions."""

    questions: list[Question]
    num_left_out: int  # which an evaluation asks too


def _questions(args: argparse.Namespace, evaluated: Evaluated) -> _Asked:
    questions: list[Question] = []
    for source in args.source:
        found = read_questions(source, field=args.field)
        questions += found[: args.max_prompts]
    kept = [q for q in questions if not any(evaluated.holds(text) for _, text in q.messages)]
    if not (kept or args.self_chat or args.self_text):
        found = f"{len(questions)} questions of --source" if args.source else "no --source"
        left = ", all of which --exclude holds" if questions else ""
        raise ConfigError(
            f"something must be asked, got {found}{left}; set another --source, --self-chat or "
            "--self-text."
        )
    return _Asked(kept, len(questions) - len(kept))


def _run(args: argparse.Namespace) -> None:
    sampling, evaluated = _sampling(args), Evaluated(args.exclude)
    kept, num_left_out = _questions(args, evaluated)
    share = join_launch(args.device)
    target = load_target(args.target, dtype=args.dtype, device=args.device, weights=args.weights)
    tokenizer = cast(SpecialTokenizer, load_tokenizer(args.target))  # fields set at run time
    if share.rank == 0:
        _check_settings(args.output, target=target, sampling=sampling)
        gather_parts(args.output)  # of a launch that was killed
    done = share.in_turns(lambda: _existing_ids(args.output))
    engine = _engine(args, target)
    tasks = share.of(question_tasks(kept, tokenizer)) if kept else []
    ask = partial(invent, target, tokenizer, share=share, seed=args.seed, engine=engine)
    invented = ask(self_chat, count=args.self_chat, first_number=len(kept))
    invented += ask(self_text, count=args.self_text, first_number=len(kept) + args.self_chat)
    asked = tasks + invented
    tasks = [task for task in asked if not evaluated.holds(tokenizer.decode(task.own_words))]
    num_refused, num_invented = share.sums([len(asked) - len(tasks), len(invented)])
    num_left_out += num_refused
    sampling = replace(sampling, stop_token_ids=target.stop_token_ids)
    output = part_of(args.output, share.rank)
    answered = answer(target, tasks, output=output, sampling=sampling, engine=engine, done=done)
    answered = Answered(*share.sums(answered))
    share.leave()
    if share.rank == 0:
        gather_parts(args.output)
        _finish(args, answered, num_left_out=num_left_out)
        num_wanted = args.self_chat + args.self_text
        if num_invented < num_wanted:
            print(
                f"{num_wanted - num_invented} of {num_wanted} messages and beginnings that the "
                "target invented were left out: they did not end, were too short, or held special "
                "tokens; ask for more with --self-chat or --self-text"
            )


def _run_endpoint(args: argparse.Namespace) -> None:
    """Let a server answer; the target gives its tokenizer, and its embedding to be known by."""
    sampling = _sampling(args)
    kept, num_left_out = _questions(args, Evaluated(args.exclude))
    server = find_server(
        args.endpoint,
        target=args.target,
        served_model=args.served_model,
        timeout_s=args.timeout_s,
        key_variable=args.api_key_variable,
        options=OPTIONS,
    )
    limits = [limit for limit in (server.max_model_len, args.max_model_len) if limit is not None]
    server = replace(server, max_model_len=min(limits, default=None))
    target = load_target(args.target, device="cpu", layers="none")
    tokenizer = cast(SpecialTokenizer, load_tokenizer(args.target))  # fields set at run time
    _check_settings(args.output, target=target, sampling=sampling, served_model=server.model)
    found = answer_by_server(
        server,
        question_tasks(kept, tokenizer),
        output=args.output,
        sampling=sampling,
        reader=Reader(tokenizer, target.stop_token_ids, target.config.vocab_size),
        concurrency=args.concurrency,
        done=_existing_ids(args.output),
    )
    _finish(args, found.answered, num_left_out=num_left_out)
    if found.num_encoded:
        print(
            f"{found.num_encoded} answers came as text and were tokenised here, "
            f"{found.num_different} of them into another number of tokens than the server counts"
        )


def _finish(args: argparse.Namespace, answered: Answered, *, num_left_out: int) -> None:
    if args.xz:
        write_xz(args.output)
    print(
        f"{answered.num_written} of {sum(answered)} documents written to {args.output}, "
        f"{answered.num_there} were there, {answered.num_too_long} prompts fill the context, "
        f"{num_left_out} left out as questions of --exclude"
    )
    lines = args.output.read_text(encoding="utf8").splitlines()
    records = _parse(lines, args.output)
    lengths = [len(one["token_ids"]) - one["num_prompt_tokens"] for one in records]
    if num_cut := sum(length >= args.max_new_tokens for length in lengths):
        print(
            f"{num_cut} of {len(lengths)} answers reach --max-new-tokens={args.max_new_tokens}, "
            "where they are cut; a larger one, with another --output, gives whole texts"
        )


def _engine(args: argparse.Namespace, target: Target) -> EngineConfig:
    """Settings of the loop; with graphs those of `conf/engine/h200.yaml`, and prompts together."""
    common = EngineConfig(
        max_num_requests=args.batch,
        max_num_batched_tokens=max(512, 4 * args.batch),
        max_model_len=args.max_model_len,
        audit=False,
    )
    captured = captured_engine(target, batch=args.batch, max_model_len=args.max_model_len)
    if args.graphs is None and target.device.type == "cuda":
        try:
            require_capturable_target(target, engine=captured)
        except ConfigError as fault:
            print(f"steps are not captured: {fault}", file=sys.stderr)
            return common
        return captured
    return captured if args.graphs else common


def captured_engine(target: Target, *, batch: int, max_model_len: int | None) -> EngineConfig:
    """Settings for whole texts at the highest rate, where nobody waits for a first token.

    A step with prompt rows costs several decoding steps, so that places are given away together.
    Where steps are captured up to the largest bucket none is larger: it would wait for launches.
    """
    num_parameters = sum(weight.numel() for weight in target.model.parameters())
    is_small = pays_captured(MIXED_ROWS[-1], num_parameters=num_parameters)
    return EngineConfig(
        backend="triton",
        max_num_requests=batch,
        max_num_batched_tokens=MIXED_ROWS[-1] if is_small else 8192,
        max_prefill_chunk=2048,
        max_model_len=max_model_len,
        admit_together=max(1, batch // _PLACES_A_TURN),
        deferred_output=True,
        cuda_graphs=True,
        compile=True,
        capture_mixed=True,
        audit=False,
    )


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
    found = sort_out(tasks, done=done, max_model_len=decoder.max_model_len)

    def params_of(task: Task) -> SamplingParams:
        return replace(sampling, seed=(sampling.seed or 0) + task.number)

    if found.asked and decoder.is_captured:
        decoder.warm_up(sampling, num_requests=len(found.asked))
    num_written = write_answers(
        decoder, found.asked, output=output, params_of=params_of, num_there=found.num_there
    )
    return Answered(num_written, found.num_there, found.num_too_long)


@old_objects_kept()
def write_answers(
    decoder: SpecDecoder,
    tasks: Sequence[Task],
    *,
    output: Path,
    params_of: Callable[[Task], SamplingParams],
    num_there: int = 0,
) -> int:
    """Append the continuation of every task to `output`; returns how many.

    Requests are made as places come free, one batch ahead, and lines are written as texts end: with
    captured steps both happen while the device runs the next step.
    """
    records, asked = decoder.stats.records, {task.doc_id: task for task in tasks}
    coming, num_seen, num_written = iter(tasks), len(decoder.stats.records), 0
    progress = WorkProgress(
        "answers", total=len(tasks) + num_there, unit="documents", first=num_there
    )
    with output.open("a", encoding="utf8") as file, progress:
        while num_written < len(tasks):
            while decoder.num_waiting < decoder.engine.max_num_requests:
                if (task := next(coming, None)) is None:
                    break
                params = params_of(task)
                decoder.add_request(task.prompt, sampling=params, request_id=task.doc_id)
            decoder.step()
            if num_seen == len(records):
                continue
            ended = records[num_seen:]
            file.writelines(asked[one.request_id].line(one.output_token_ids) for one in ended)
            file.flush()
            num_seen, num_written = len(records), num_written + len(ended)
            progress.done(num_there + num_written)
    return num_written


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
    return _ids(lines, output)


def _ids(lines: Sequence[str], path: Path) -> set[str]:
    ids = set()
    for number, record in enumerate(_parse(lines, path), start=1):
        if not (isinstance(record, dict) and {"id", "token_ids"} <= record.keys()):
            raise ConfigError(
                f"--output must hold answers of regenerate, got a line without id and token_ids "
                f"({path}:{number}); name another file."
            )
        ids.add(record["id"])
    return ids


def _parse(lines: Sequence[str], path: Path) -> Iterator[dict]:
    for number, line in enumerate(lines, start=1):
        try:
            yield json.loads(line)
        except json.JSONDecodeError as fault:
            raise IntegrityError(
                f"{path}:{number}: invalid JSON ({fault.msg}); remove the line or the file."
            ) from fault


def _settings_of(output: Path) -> Path:
    return output.with_name(f"{output.name}.settings.json")


def _check_settings(
    output: Path, *, target: Target, sampling: SamplingParams, served_model: str | None = None
) -> None:
    """Refuse to go on with answers of another target or of other settings; else record them."""
    path = _settings_of(output)
    names = ("temperature", "top_k", "top_p", "seed", "max_new_tokens")
    settings = target_hashes(target) | {name: getattr(sampling, name) for name in names}
    settings["served_model"] = served_model  # None: answered by our own decode loop
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
    parser = OptionParser(prog="mtp regenerate", description=about)
    add = parser.add_argument
    add("--target", required=True, help="folder or hub id of the target")
    add("--output", type=Path, required=True, help="JSONL file, appended to")
    sources = "questions: a file, a folder, or NAME[:CONFIG][@SPLIT] on the hub; may be repeated"
    add("--source", action="append", default=[], help=sources)
    add("--field", help="of the conversation in a row; left out: the first known")
    excluded = "prompts of an evaluation: equal questions, or 13 words in a row, are left out"
    add("--exclude", action="append", default=[], help=f"{excluded}; may be repeated")
    add("--max-prompts", type=positive, default=None, help="per source")
    add("--self-chat", type=int, default=0, help="user messages that the target invents")
    add("--self-text", type=int, default=0, help="documents that the target begins")
    add("--temperature", type=float, default=0.6, help="default %(default)s; 0 is greedy")
    unread = "default %(default)s; not read at temperature 0"
    add("--top-p", type=float, default=0.95, help=unread)
    add("--top-k", type=int, default=20, help=unread)
    most_new = "tokens of an answer at most, default %(default)s: longer ones are cut there"
    add("--max-new-tokens", type=positive, default=96, help=most_new)
    add("--batch", type=positive, default=32, help="requests decoded at once, default %(default)s")
    most = "tokens of prompt and answer; default: what the target can"
    add("--max-model-len", type=positive, help=most)
    graphs = "steps compiled and captured, as engine=h200; default: on a GPU, where the family can"
    add("--graphs", action=argparse.BooleanOptionalAction, help=graphs)
    add("--dtype", default="auto")
    add("--device", default="auto")
    add("--weights", default="stored", choices=WEIGHTS, help="random: to rehearse, see the guide")
    add("--seed", type=int, default=0)
    add("--xz", action="store_true", help="also write OUTPUT.xz, lines sorted by id")
    served = parser.add_argument_group("answers of a server")
    add = served.add_argument
    add(
        "--endpoint", metavar="URL", help="server of OpenAI's API, such as http://localhost:8000/v1"
    )
    add("--served-model", metavar="NAME", help="what it calls the target; left out: a name alike")
    add("--concurrency", type=positive, default=32, help="requests open at once")
    add("--timeout-s", type=float, default=600.0, help="seconds that an answer may take")
    add("--api-key-variable", metavar="NAME", help="environment variable that holds its key")
    return parser
