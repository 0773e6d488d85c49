"""Heads that learn from hidden states which a server writes to a folder while they train."""

import copy
import fcntl
import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from mtp_research.app.cli import compose_config
from mtp_research.config.rules import validate
from mtp_research.config.schema import TrainConfig
from mtp_research.data import served_states
from mtp_research.data import server as api
from mtp_research.data.engine_states import StatesForm, read_last_states
from mtp_research.data.packing import EncodedDocument, pack_first_fit
from mtp_research.models.target import Target
from mtp_research.runtime.errors import ConfigError, EnvironmentFault, IntegrityError
from mtp_research.training.loop import train_heads
from mtp_research.training.packed_rows import OPTIONS
from mtp_research.training.setup import build_run, make_accelerator
from tests.training.test_imported_states import engine_file, figures, lab, target

__all__ = ["lab", "target"]  # fixtures


class Engine:
    """A server that answers as vLLM does: the reply names a file that is written behind it."""

    def __init__(self, target: Target, folder: Path) -> None:
        self.target, self.folder = target, folder
        self.prompts: list[list[int]] = []
        self.most_files = self.num_open = self.most_open = 0
        self.change: Callable[[dict[str, Tensor]], object] = lambda tensors: None
        self.reply: Callable[[dict[str, Any]], dict[str, Any]] = lambda reply: reply
        self.status = 200
        self._lock = threading.Lock()
        engine = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._send(200, {"data": [{"id": "lab_tiny"}]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                assert (body["model"], body["max_tokens"]) == ("lab_tiny", 1)
                engine.num_open += 1
                engine.most_open = max(engine.most_open, engine.num_open)
                with engine._lock:
                    status, answer = engine.status, engine.answer(body["prompt"])
                    engine.num_open -= 1  # before the reply, behind which the next one comes
                self._send(status, answer)

            def _send(self, status: int, content: dict[str, Any]) -> None:
                text = json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *words: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        # `shutdown` waits for its next look, half a second by default.
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def answer(self, prompt: list[int]) -> dict[str, Any]:
        path = self.folder / f"cmpl-{len(self.prompts)}.safetensors"
        self.prompts.append(prompt)
        lock = path.with_name(f"{path.name}.lock").open("w")
        fcntl.flock(lock, fcntl.LOCK_EX)
        path.write_bytes(b"not whole")
        tensors = engine_file(self.target, prompt)
        self.change(tensors)

        def write() -> None:
            time.sleep(0.01)
            save_file(tensors, path)
            lock.close()

        threading.Thread(target=write).start()
        self.most_files = max(self.most_files, len(list(self.folder.glob("*.safetensors"))))
        return self.reply({"kv_transfer_params": {"hidden_states_path": str(path)}})


@pytest.fixture
def engine(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    monkeypatch.setattr(api, "WAITS_S", (0.0, 0.0))
    folder = tmp_path / "states"
    folder.mkdir()
    engine = Engine(target, folder)
    yield engine
    engine.server.shutdown()
    engine.server.server_close()


def served(lab: TrainConfig, engine: Engine, *, ahead: int = 3, **head: str) -> TrainConfig:
    config = copy.deepcopy(lab)
    config.data.states_endpoint, config.data.states_ahead = engine.url, ahead
    config.data.states_model = "lab_tiny"
    for key, value in head.items():
        setattr(config.head, key, value)
    validate(config)
    return config


@pytest.mark.parametrize("hidden_source", ["post_norm", "pre_norm"])
def test_heads_learn_what_they_learn_beside_the_target(lab, engine, tmp_path, hidden_source):
    config = served(lab, engine, hidden_source=hidden_source)
    train_heads(config, tmp_path / "served")
    config.data.states_endpoint = None
    train_heads(config, tmp_path / "own")
    found, expected = figures(tmp_path / "served"), figures(tmp_path / "own")
    assert len(expected) == 5  # two steps, an evaluation before and behind them, and the best one
    assert found == pytest.approx(expected, rel=1e-5)
    assert list(engine.folder.iterdir()) == [], "what was read is removed"


def six_rows(engine: Engine, *, device: str) -> tuple[served_states.ServedStates, list[list[int]]]:
    """Rows of a document each, two ahead, and the token ids that the server is asked for."""
    texts = [tuple(range(start, start + 9)) for start in range(6)]
    documents = [EncodedDocument(f"{n}", "d", text, (True,) * 9) for n, text in enumerate(texts)]
    packed = pack_first_fit(documents, seq_len=12, pad_id=0)
    states = served_states.ServedStates(
        packed,
        server=api.Server(f"{engine.url}/v1", "lab_tiny", None, 10.0, None, OPTIONS),
        form=StatesForm(OPTIONS.endpoint, engine.target.config.hidden_size, engine.target.dtype),
        ahead=2,
        keeps=True,
        device=torch.device(device),
    )
    return states, [list(row[:9]) for row in packed.token_ids.tolist()]


def test_server_is_asked_a_few_rows_ahead_in_the_order_of_their_use(engine, target, monkeypatch):
    monkeypatch.setattr(served_states, "MOST_AT_ONCE", 2)
    states, asked = six_rows(engine, device="cpu")

    def settled(count: int) -> list[list[int]]:
        deadline = time.monotonic() + 10
        while len(engine.prompts) < count and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.1)  # in which a server that may be asked for more would be
        return sorted(engine.prompts)

    expected = engine_file(target, asked[4])["hidden_states"][:, -1]  # no server hooks in yet
    states.follow([4, 0, 5, 2, 1])
    assert settled(2) == sorted([asked[4], asked[0]])
    found = states.rows([4])
    assert found.shape == (1, 12, target.config.hidden_size)
    assert torch.allclose(found[0, :9], expected, atol=1e-5)
    assert not found[0, 9:].any()
    assert settled(3) == sorted([asked[4], asked[0], asked[5]])
    states.rows([3])  # as an evaluation does, which is not announced
    assert settled(4) == sorted([asked[4], asked[0], asked[5], asked[3]])
    states.rows([4, 3])  # both are kept
    assert len(settled(4)) == 4
    states.rows(range(6))
    assert engine.most_open == 2
    assert engine.most_files <= 3
    times, _ = states.times, settled(8)
    assert len(states._connection._idle) == 2, "clients are used again"
    assert times.num_served == 8
    assert min(times.server_s, times.writer_s, times.reading_s, times.waited_s) > 0


@pytest.mark.gpu
def test_host_does_not_wait_for_the_device_where_rows_are_copied_to_it(engine, target):
    states, asked = six_rows(engine, device="cuda")
    expected = [engine_file(target, asked[row])["hidden_states"][:, -1] for row in (0, 1)]
    states.rows([0, 1])  # memory is pinned and the first kernels are loaded
    torch.cuda._sleep(10**10)  # cycles: seconds
    is_done = torch.cuda.Event()
    is_done.record()
    found = states.rows([1, 0])
    assert not is_done.query()
    assert torch.allclose(found[:, :9].cpu(), torch.stack(expected[::-1]), atol=1e-5)
    assert not found[:, 9:].any()


def test_finite_states_whose_sum_is_not_are_read(tmp_path):
    states = torch.full((2, 1, 4), 3e38)
    save_file({"hidden_states": states, "token_ids": torch.arange(2)}, tmp_path / "f.safetensors")
    found = read_last_states(tmp_path / "f.safetensors", length=2)
    assert torch.equal(found, states[:, 0])


def test_training_goes_on_where_the_server_left_it(lab, engine, tmp_path):
    config = served(lab, engine, ahead=1)
    config.trainer.max_steps = config.trainer.eval_every = config.trainer.save_every = 3
    whole = copy.deepcopy(config)
    train_heads(whole, tmp_path / "whole")
    num_before = len(engine.prompts)
    engine.prompts.clear()

    def dies_in_the_middle(reply: dict[str, Any]) -> dict[str, Any]:
        if len(engine.prompts) > num_before - 2:
            engine.status = 500
        return reply

    engine.reply = dies_in_the_middle
    with pytest.raises(EnvironmentFault, match=r"data.states_endpoint .* goes on from the last"):
        train_heads(config, tmp_path / "two")
    (saved,) = (tmp_path / "two").glob("step_*")
    assert saved.name == "step_000002"
    engine.status, engine.reply = 200, lambda reply: reply
    train_heads(config, tmp_path / "two")
    assert figures(tmp_path / "two") == pytest.approx(figures(tmp_path / "whole"), rel=1e-5)


@pytest.mark.parametrize(
    ("change", "fault", "message"),
    [
        (lambda t: t["token_ids"].add_(1), IntegrityError, "token ids that were sent"),
        (lambda t: t["hidden_states"][1].fill_(torch.nan), IntegrityError, "must be finite"),
        (
            lambda t: t.update(hidden_states=t["hidden_states"][..., 1:].clone()),
            IntegrityError,
            "hidden size",
        ),
        (
            lambda t: t.update(hidden_states=t["hidden_states"].bfloat16()),
            ConfigError,
            r"data.states_endpoint must give .* set model.dtype=bfloat16",
        ),
    ],
    ids=["tokens", "nan", "size", "dtype"],
)
def test_file_that_is_not_of_the_row_ends_the_run(lab, engine, tmp_path, change, fault, message):
    engine.change = change
    with pytest.raises(fault, match=message):
        train_heads(served(lab, engine), tmp_path / "run")


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (lambda reply: {"choices": []}, "must say where it wrote"),
        (
            lambda reply: {"kv_transfer_params": {"hidden_states_path": "/nowhere/x.safetensors"}},
            "must write to a folder of this machine.* leave its use_synchronization_lock on",
        ),
    ],
    ids=["no-path", "far-away"],
)
def test_server_whose_files_cannot_be_read_is_refused(lab, engine, tmp_path, reply, message):
    engine.reply = reply
    with pytest.raises(ConfigError, match=f"data.states_endpoint .*{message}"):
        train_heads(served(lab, engine), tmp_path / "run")


def test_document_that_the_server_refuses_names_the_key(lab, engine, tmp_path):
    engine.status = 400
    with pytest.raises(ConfigError, match=r"must read documents of \d+ tokens.* data.seq_len"):
        train_heads(served(lab, engine), tmp_path / "run")


def test_states_of_another_layer_show_in_the_first_lines(lab, engine):
    config = served(lab, engine)

    def nats() -> float:
        loaded = build_run(config, accelerator=make_accelerator(config)).loaded
        assert loaded.startswith("target: 3 layers not loaded, hidden states from data.states_end")
        return float(loaded.partition(" have ")[2].split()[0])

    right = nats()
    engine.change = lambda tensors: tensors["hidden_states"][:, 1].copy_(
        tensors["hidden_states"][:, 0]
    )
    assert right < 0.1 < 1 < nats()


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("data.hidden_cache=/tmp/x", "beside data.hidden_cache"),
        ("task=target", "for task=target"),
        ("trainer.shard_target=true", "for trainer.shard_target=true"),
    ],
)
def test_what_excludes_a_server_is_named(word, reason):
    with pytest.raises(ConfigError, match=f"data.states_endpoint must be null {reason}, got u"):
        compose_config(TrainConfig, ["data.states_endpoint=u", word])
