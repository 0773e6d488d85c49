"""Heads that train while vLLM serves their target, against the same training beside it, on a GPU.

    python tools/gpu_served.py --out $OUT --target FOLDER   a Llama in transformers' form; vLLM 0.24
    python tools/gpu_served.py --out $OUT --random          random weights of SmolLM2-135M's shape
    python tools/gpu_served.py --out /tmp/x --target FOLDER --endpoint URL    a server that runs

Three trainings with the same rows and seed: `live` and `again` compute the target's states in their
own process, `served` takes them from the server. `again` splits the rows of a step in two, so that
its curve differs by rounding alone; it runs while the server starts. Rows are text of Python's own
library, a document each, none of them read twice. Rates are of the last two thirds of the steps.

`split_ms` says where the milliseconds of these steps went: `step` is a whole one, `waiting` is the
part in which the training stood still for rows and `training` the rest, in which it shares the card
with the server. `document_server`, `document_writer` and `document_reading` are of one document:
until the reply, until its file is whole, and until it is read. Many are under way at once.

One JSON line, all curves in `served.json`, and the ends of logs where something failed. Exit status
1: something failed, the curves part, or the server is too slow.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from mtp_research.runtime.threads import wait_passively

wait_passively()

import httpx
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from mtp_research.training.tracking import METRICS_FILE

LIMIT_S, READY_S, TRAIN_S = 230.0, 120.0, 80.0  # of everything, until it is ready, of a training
LEAST_RATE = 0.8  # tokens/s of `served`, `live` = 1
MOST_GAP = 0.02  # mean of |served - live| / live over the steps, in bfloat16
PORT, SERVER_MEMORY = 8123, 0.3
SHAPE = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
SHAPE |= {"num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152}
_TAIL = 20_000  # characters of a log


def main(argv: Sequence[str] | None = None) -> int:
    """Start the server, train three times, compare."""
    options, started_s = _parse(argv), time.perf_counter()
    options.out.mkdir(parents=True, exist_ok=True)
    memory = Path("/dev/shm")
    work = Path(tempfile.mkdtemp(prefix="served-", dir=memory if memory.is_dir() else None))
    (work / "states").mkdir()
    server, found, fault = None, {}, None
    try:
        target = random_target(work / "target") if options.random else options.target
        url = options.endpoint or f"http://127.0.0.1:{PORT}/v1"
        if options.endpoint is None:
            words = server_words(target, work / "states", seq_len=options.seq_len)
            server = _start(words, work / "server.log")
        write_documents(work / "rows.jsonl", target, options)
        for name in ("again", "live", "served"):
            if name == "live":
                found["ready_s"] = wait_ready(url, server, started_s)
            limit_s = min(TRAIN_S, LIMIT_S - (time.perf_counter() - started_s))
            words = train_words(name, target, work, options, url=url)
            found[name] = train(words, work / name, num_steps=options.steps, limit_s=limit_s)
    except (RuntimeError, OSError) as failed:
        fault = f"{type(failed).__name__}: {failed}"
        for log in work.glob("*.log"):
            tail = log.read_text(errors="replace")[-_TAIL:]
            (options.out / f"{log.stem}_tail.txt").write_text(tail)
    finally:
        stop(server)
        num_left = len(list((work / "states").iterdir()))
        shutil.rmtree(work, ignore_errors=True)
    result = compare(found) if fault is None else {"is_fine": False, "fault": fault}
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    record: dict[str, Any] = {"device": gpu, "torch": torch.__version__, "num_files_left": num_left}
    record |= {name: str(value) for name, value in vars(options).items()}
    record |= {"wall_s": time.perf_counter() - started_s, **result}
    (options.out / "served.json").write_text(json.dumps(record | {"runs": found}))
    print(json.dumps(record), flush=True)
    return int(not result["is_fine"])


def random_target(folder: Path) -> Path:
    """Random weights of SmolLM2-135M's shape, with the shipped tokenizer."""
    torch.manual_seed(0)
    config = LlamaConfig(**SHAPE, max_position_embeddings=8192, tie_word_embeddings=True)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    for path in (ROOT / "assets" / "lab_tiny" / "target").glob("*token*"):
        shutil.copy(path, folder)
    return folder


def write_documents(path: Path, target: Path, options: argparse.Namespace) -> None:
    """As many documents of `seq_len` tokens as all steps read, and eight that are held out."""
    pieces = _pieces(AutoTokenizer.from_pretrained(target), options.seq_len)
    with path.open("w") as file:
        for number in range(options.steps * options.batch + 8):
            row = {"id": str(number), "token_ids": next(pieces), "num_prompt_tokens": 1}
            file.write(json.dumps(row) + "\n")


def _pieces(tokenizer: Any, length: int) -> Iterator[list[int]]:
    """Pieces of the library's text; where it ends, it is cut elsewhere."""
    library = sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))
    for shift in range(0, length, max(length // 8, 1)):
        for path in (one for one in library if "site-packages" not in one.parts):
            text = path.read_text(encoding="utf8", errors="ignore")
            ids = tokenizer(text, add_special_tokens=False)["input_ids"][shift:]
            yield from (ids[at : at + length] for at in range(0, len(ids) - length + 1, length))


def server_words(target: Path, states: Path, *, seq_len: int) -> list[str]:
    """The server as docs/data.md starts it, without compiling: states of the last layer."""
    last = json.loads((target / "config.json").read_text())["num_hidden_layers"]
    layers = {"hf_config": {"eagle_aux_hidden_state_layer_ids": [last]}}
    speculative = {"method": "extract_hidden_states", "num_speculative_tokens": 1}
    connector = {"kv_connector": "ExampleHiddenStatesConnector", "kv_role": "kv_producer"}
    connector |= {"kv_connector_extra_config": {"shared_storage_path": str(states)}}
    words = ["-m", "vllm.entrypoints.openai.api_server", "--model", str(target), "--enforce-eager"]
    words += ["--dtype", "bfloat16", "--no-enable-chunked-prefill", "--port", str(PORT)]
    words += ["--max-model-len", str(seq_len + 8), "--max-num-batched-tokens", "16384"]
    words += ["--max-num-seqs", "128", "--gpu-memory-utilization", str(SERVER_MEMORY)]
    words += ["--speculative-config", json.dumps(speculative | {"draft_model_config": layers})]
    return [*words, "--kv-transfer-config", json.dumps(connector)]


def wait_ready(url: str, server: subprocess.Popen | None, started_s: float) -> float:
    """Seconds since the start when the server lists its models."""
    while True:
        waited_s = time.perf_counter() - started_s
        try:
            if httpx.get(f"{url.removesuffix('/v1')}/v1/models", timeout=5).is_success:
                return waited_s
        except httpx.TransportError:
            pass
        if server is not None and server.poll() is not None:
            raise RuntimeError(f"the server ended with status {server.returncode}")
        if waited_s > READY_S:
            raise RuntimeError(f"the server was not ready after {READY_S:.0f} s")
        time.sleep(0.5)


def train_words(
    name: str, target: Path, work: Path, options: argparse.Namespace, *, url: str
) -> list[str]:
    """The training's command."""
    micros = 2 if name == "again" else 1
    words = [str(ROOT / "train.py"), f"model={options.model}", f"model.path={target}"]
    words += ["head=shared_n1", "objective=ttt", f"data.path={work}/rows.jsonl"]
    words += [f"data.seq_len={options.seq_len}", "data.eval_documents=8"]
    words += [
        f"trainer.{word}={options.steps}" for word in ("max_steps", "eval_every", "save_every")
    ]
    words += ["trainer.learning_rate=1e-3", f"trainer.batch_size={options.batch // micros}"]
    words += [f"trainer.gradient_accumulation_steps={micros}", f"output_dir={work}/{name}"]
    if name == "served":
        words += [f"data.states_endpoint={url}", f"data.states_ahead={4 * options.batch}"]
    return words


def train(words: list[str], folder: Path, *, num_steps: int, limit_s: float) -> dict[str, Any]:
    """The figures of a training in a process of its own."""
    process, begun_s = _start(words, folder.with_suffix(".log")), time.perf_counter()
    seen_s: list[float] = []  # when each step was there
    try:
        while process.poll() is None:
            now_s = time.perf_counter() - begun_s
            if now_s > limit_s:
                raise RuntimeError(f"{folder.name} was not done after {limit_s:.0f} s")
            seen_s += [now_s] * (len(_lines(folder, "train")) - len(seen_s))
            time.sleep(0.05)
    finally:
        stop(process)
    if process.returncode or len(seen_s) < num_steps:
        raise RuntimeError(f"{folder.name} ended with {process.returncode} at step {len(seen_s)}")
    return figures(folder, seen_s)


def figures(folder: Path, seen_s: list[float]) -> dict[str, Any]:
    """What a training wrote; each step was there at a time of `seen_s`."""
    steps, results = _lines(folder, "train"), _lines(folder, "result")
    third = len(steps) // 3
    wall_s = seen_s[-1] - seen_s[third] + 1e-9
    num_tokens = sum(step["num_tokens"] for step in steps[third + 1 :])
    step_ms = wall_s * 1e3 / max(len(steps) - third - 1, 1)
    return {
        "losses": [step["loss"] for step in steps],
        "tokens_per_s": num_tokens / wall_s,
        "acceptance_length": results[-1]["acceptance_length_last"],
        # Times are of the moment of writing: a step later, and the last two lines come at once.
        "split_ms": {"step": step_ms} | _split_ms(steps[third], steps[-2], step_ms=step_ms),
    }


def _split_ms(first: dict[str, Any], last: dict[str, Any], *, step_ms: float) -> dict[str, float]:
    """Of a step: waiting for rows, and the rest; of a document: server, writer, reading."""
    if "waited_s" not in last:
        return {}
    names = ("num_served", "server_s", "writer_s", "reading_s", "waited_s")
    count, *spent_s, waited_s = (last[name] - first[name] for name in names)
    waited_ms = waited_s * 1e3 / max(last["step"] - first["step"], 1)
    split = {"waiting": waited_ms, "training": step_ms - waited_ms}
    parts = zip(("server", "writer", "reading"), spent_s, strict=True)
    return split | {f"document_{name}": 1e3 * part_s / max(count, 1) for name, part_s in parts}


def _lines(folder: Path, kind: str) -> list[dict[str, Any]]:
    path = folder / METRICS_FILE
    text = path.read_text() if path.is_file() else ""
    lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return [line for line in lines if line["kind"] == kind]


def compare(found: dict[str, Any]) -> dict[str, Any]:
    """Gaps of the curves to `live`, rates, and whether they are good enough."""
    live, result = found["live"], {"ready_s": found.pop("ready_s")}
    for name in ("again", "served"):
        pairs = zip(found[name]["losses"], live["losses"], strict=True)
        gaps = [abs(one - other) / other for one, other in pairs]
        result[f"gap_{name}"] = {"max": max(gaps), "mean": sum(gaps) / len(gaps)}
    for key in ("tokens_per_s", "acceptance_length", "split_ms"):
        result[key] = {name: run[key] for name, run in found.items()}
    ratio = found["served"]["tokens_per_s"] / live["tokens_per_s"]
    is_fine = ratio >= LEAST_RATE and result["gap_served"]["mean"] <= MOST_GAP
    return {"is_fine": is_fine, "served_ratio": ratio, **result}


def _start(words: list[str], log: Path) -> subprocess.Popen:
    """Python in a group of its own, so that its children end with it."""
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": paths, "VLLM_USE_V2_MODEL_RUNNER": "0"}
    settings: dict[str, Any] = {"stderr": subprocess.STDOUT, "start_new_session": True}
    with log.open("w") as file:
        return subprocess.Popen([sys.executable, *words], stdout=file, env=environment, **settings)


def stop(process: subprocess.Popen | None) -> None:
    """End a process and its children, at last by force."""
    for number, wait_s in ((signal.SIGTERM, 5), (signal.SIGKILL, 10)):
        try:
            if process is not None:
                os.killpg(process.pid, number)
                process.wait(timeout=wait_s)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    group = parser.add_mutually_exclusive_group(required=True)
    group.add_argument("--target", type=Path, help="folder in transformers' form")
    group.add_argument("--random", action="store_true")
    add = parser.add_argument
    add("--out", type=Path, required=True)
    add("--model", default="llama", help="of conf/model")
    add("--endpoint", help="a server that serves the target and writes to this machine")
    add("--steps", type=int, default=240)
    add("--batch", type=int, default=8, help="rows a step, even")
    add("--seq-len", type=int, default=1024)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
