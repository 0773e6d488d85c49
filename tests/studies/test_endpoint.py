"""`regenerate --endpoint`: a real server's answers are our own; faults, resume, refusals."""

import asyncio
import json
import os
import re
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from examples.serve import load_server
from mtp_research.config.training_schema import DataConfig
from mtp_research.data import server as api
from mtp_research.models.target import load_tokenizer
from mtp_research.runtime.provenance import REPOSITORY_ROOT
from mtp_research.studies import endpoint
from mtp_research.studies.regenerate import main
from mtp_research.training.documents import read_head_documents
from tests.serving import Running

TARGET = str(REPOSITORY_ROOT / "assets" / "lab_tiny" / "target")
QUESTIONS = [f"What is {left} + {left + 3}?" for left in range(5)]
GREEDY = ("--temperature", "0", "--max-new-tokens", "12")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(TARGET)


@pytest.fixture
def source(tmp_path: Path) -> str:
    path = tmp_path / "set.jsonl"
    path.write_text("".join(json.dumps({"question": text}) + "\n" for text in QUESTIONS))
    return str(path)


@pytest.fixture(scope="module")
def running() -> Any:
    words = ["model=lab_tiny", "model.device=cpu", "model.dtype=float32", "spec.k=0"]
    running = Running(load_server([*words, "engine.max_model_len=512"]).answer)
    yield running
    running.stop()


def run(output: Path, source: str, *words: str) -> int:
    argv = ["--target", TARGET, "--output", str(output), "--source", source, *words]
    return main([*argv, *GREEDY])


def lines(output: Path) -> dict[str, dict[str, Any]]:
    return {record["id"]: record for record in map(json.loads, output.read_text().splitlines())}


class Fake:
    """A server in OpenAI's form, as a transport; answers with the number of the question."""

    def __init__(self, tokenizer: Any, *, gives_ids: bool = True, has_prompts: bool = True) -> None:
        self.tokenizer, self.gives_ids, self.has_prompts = tokenizer, gives_ids, has_prompts
        self.model: dict[str, Any] = {"id": "lab_tiny"}
        self.extra_tokens = 0  # that it counts in a prompt beside ours
        self.script: list[Callable[[], httpx.Response]] = []  # before any answer
        self.asked: list[dict[str, Any]] = []
        self.headers: list[httpx.Headers] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [self.model]})
        body = json.loads(request.content)
        if self.script:
            return self.script.pop(0)()
        if "return_token_ids" in body and not self.gives_ids:
            return httpx.Response(400, json={"error": {"message": "return_token_ids: unknown"}})
        is_chat = "messages" in body
        if not is_chat and not self.has_prompts:
            return httpx.Response(404, json={"detail": "Not Found"})
        self.asked.append(body)
        self.headers.append(request.headers)
        prompt, text = self._read(body, is_chat=is_chat)
        number = re.findall(r"What is (\d)", text)[0]
        said = self.tokenizer.encode(f"It is {number}.", add_special_tokens=False)
        choice: dict[str, Any] = {"finish_reason": "length"}
        if is_chat:
            choice["message"] = {"role": "assistant", "content": f"It is {number}."}
        else:
            choice["text"] = f"It is {number}."
        if body.get("return_token_ids"):
            choice["token_ids"] = said
        usage = {"prompt_tokens": len(prompt) + self.extra_tokens, "completion_tokens": len(said)}
        return httpx.Response(200, json={"choices": [choice], "usage": usage})

    def _read(self, body: dict[str, Any], *, is_chat: bool) -> tuple[list[int], str]:
        if is_chat:
            prompt = self.tokenizer.apply_chat_template(
                body["messages"], add_generation_prompt=True, return_dict=False
            )
        elif isinstance(body["prompt"], str):
            prompt = self.tokenizer.encode(body["prompt"])
        else:
            prompt = body["prompt"]
        return prompt, self.tokenizer.decode(prompt)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], tuple[str, ...]]:
    """Lets every connection end at a handler; the words of the command line that name it."""

    def use(handler: Any) -> tuple[str, ...]:
        client = partial(httpx.AsyncClient, transport=httpx.MockTransport(handler))
        monkeypatch.setattr(api.httpx, "AsyncClient", client)
        monkeypatch.setattr(api, "WAITS_S", (0.0, 0.0))
        return ("--endpoint", "http://server")

    return use


def test_texts_of_a_real_server_are_those_of_the_local_mode(tmp_path, source, running, tokenizer):
    assert run(tmp_path / "local.jsonl", source, "--device", "cpu", "--dtype", "float32") == 0
    address = f"http://127.0.0.1:{running.port}"
    assert run(tmp_path / "served.jsonl", source, "--endpoint", address, "--concurrency", "3") == 0
    local, served = lines(tmp_path / "local.jsonl"), lines(tmp_path / "served.jsonl")
    assert set(local) == set(served)
    for doc_id, record in local.items():
        assert served[doc_id].pop("encoded_from_text") is True
        assert tokenizer.decode(served[doc_id]["token_ids"]) == tokenizer.decode(
            record["token_ids"]
        )
        assert served[doc_id] == record  # greedy text of this tokenizer has one encoding


def test_token_ids_of_the_server_are_kept_and_read_as_training_text(
    tmp_path, source, served, tokenizer, capsys
):
    server = Fake(tokenizer)
    assert run(tmp_path / "out.jsonl", source, *served(server), "--xz") == 0
    assert "5 of 5 documents written" in capsys.readouterr().out
    found = lines(tmp_path / "out.jsonl")
    record = found["set.jsonl:3"]
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTIONS[2]}], add_generation_prompt=True, return_dict=False
    )
    answer = tokenizer.encode("It is 2.", add_special_tokens=False)
    assert record == {
        "id": "set.jsonl:3",
        "domain": "set",
        "token_ids": [*prompt, *answer],
        "num_prompt_tokens": len(prompt),
    }
    assert (tmp_path / "out.jsonl.xz").is_file()
    documents = read_head_documents(DataConfig(str(tmp_path / "out.jsonl")))
    assert [document.doc_id for document in documents] == list(found)
    seeds = sorted(body["seed"] for body in server.asked if isinstance(body["prompt"], list))
    assert seeds == [0, 1, 2, 3, 4]


def test_server_of_chats_alone_is_asked_in_messages(tmp_path, source, served, tokenizer, capsys):
    server = Fake(tokenizer, gives_ids=False, has_prompts=False)
    assert run(tmp_path / "out.jsonl", source, *served(server)) == 0
    assert "5 answers came as text and were tokenised here, 0 of them" in capsys.readouterr().out
    assert server.asked[0]["messages"] == [{"role": "user", "content": QUESTIONS[0]}]
    records = lines(tmp_path / "out.jsonl").values()
    assert all(record["encoded_from_text"] for record in records)
    assert {tokenizer.decode(r["token_ids"][r["num_prompt_tokens"] :]) for r in records} == {
        f"It is {number}." for number in range(5)
    }


@pytest.mark.parametrize("first", ["connection", "429", "503"])
def test_fault_that_passes_is_tried_again(tmp_path, source, served, tokenizer, monkeypatch, first):
    def lost() -> httpx.Response:
        raise httpx.ConnectError("refused")

    headers = {"Retry-After": "0.25"}
    faults = {
        "connection": lost,
        "429": lambda: httpx.Response(429, headers=headers),
        "503": lambda: httpx.Response(503, json={"message": "busy"}),
    }
    server = Fake(tokenizer)
    server.script = [faults[first]] * 2
    words = served(server)
    waited: list[float] = []

    async def sleep(seconds: float) -> None:
        waited.append(seconds)

    monkeypatch.setattr(api.asyncio, "sleep", sleep)
    monkeypatch.setattr(api, "WAITS_S", (1.0, 2.0))
    assert run(tmp_path / "out.jsonl", source, *words) == 0
    assert waited == ([0.25, 0.25] if first == "429" else [1.0, 2.0])
    assert len(lines(tmp_path / "out.jsonl")) == len(QUESTIONS)


def test_retry_after_is_read_as_seconds_or_as_a_date():
    def read(said: str) -> float | None:
        return api.retry_after_s(httpx.Response(429, headers={"Retry-After": said}))

    assert (read("7"), read("soon"), read("")) == (7.0, None, None)
    assert read("Wed, 21 Oct 2015 07:28:00 GMT") == 0.0
    later = read("Fri, 21 Oct 2150 07:28:00 GMT")
    assert later is not None
    assert later > 1e9


def test_server_that_dies_costs_one_line_and_the_same_command_goes_on(
    tmp_path, source, served, tokenizer, capsys
):
    server, whole = Fake(tokenizer), Fake(tokenizer)
    assert run(tmp_path / "whole.jsonl", source, *served(whole)) == 0

    on_disk: list[int] = []

    def dies(request: httpx.Request) -> httpx.Response:
        if len(server.asked) >= 3:  # the first two answers, and the count of the tokenizer
            on_disk.append(len(lines(tmp_path / "out.jsonl")))
            raise httpx.ConnectError("refused")
        return server(request)

    capsys.readouterr()
    assert run(tmp_path / "out.jsonl", source, *served(dies), "--concurrency", "1") == 4
    (line,) = [one for one in capsys.readouterr().err.splitlines() if one.startswith("error:")]
    assert "must answer, got ConnectError: refused 3 times in a row" in line
    assert sorted(lines(tmp_path / "out.jsonl")) == ["set.jsonl:1", "set.jsonl:2"]
    assert on_disk[0] == 2, "a kill loses what is not on disk yet"
    with (tmp_path / "out.jsonl").open("a") as file:
        file.write('{"id":"set.js')  # what a kill leaves
    assert run(tmp_path / "out.jsonl", source, *served(server)) == 0
    assert "3 of 5 documents written" in capsys.readouterr().out
    assert lines(tmp_path / "out.jsonl") == lines(tmp_path / "whole.jsonl")


def test_ctrl_c_keeps_the_answers_and_says_how_to_go_on(
    tmp_path, source, served, tokenizer, capsys
):
    server = Fake(tokenizer)

    async def interrupted(request: httpx.Request) -> httpx.Response:
        await asyncio.sleep(0.01)  # a server takes its time: the signal is met while waiting
        if len(server.asked) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return server(request)

    words = served(interrupted)
    # A shell ignores the signal for what it runs in the background, this suite included.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert run(tmp_path / "out.jsonl", source, *words, "--concurrency", "1") == 75
    finally:
        signal.signal(signal.SIGINT, before)
    assert "out.jsonl keeps its answers, the same command goes on" in capsys.readouterr().err
    assert 1 <= len(lines(tmp_path / "out.jsonl")) < len(QUESTIONS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": {"id": "other-7b"}}, "got other-7b; set --served-model"),
        ({"extra_tokens": 3}, "tokens in the prompt of set.jsonl:1"),
        ({"has_prompts": False, "extra_tokens": -1}, "whose tokenizer and chat template give"),
    ],
    ids=["name", "prompt", "chat-template"],
)
def test_server_of_another_model_is_refused(
    tmp_path, source, served, tokenizer, capsys, change, message
):
    server = Fake(tokenizer)
    vars(server).update(change)
    assert run(tmp_path / "out.jsonl", source, *served(server)) == 2
    assert message in capsys.readouterr().err
    output = tmp_path / "out.jsonl"
    assert not output.exists() or output.read_text() == ""


def test_server_whose_tokenizer_counts_otherwise_is_refused(
    tmp_path, source, served, tokenizer, capsys
):
    server = Fake(tokenizer)

    def other(request: httpx.Request) -> httpx.Response:
        reply = server(request)
        body = json.loads(request.content or b"{}")
        if isinstance(body.get("prompt"), str):  # token ids pass any tokenizer
            usage = {"prompt_tokens": reply.json()["usage"]["prompt_tokens"] + 4}
            return httpx.Response(200, json=reply.json() | {"usage": usage})
        return reply

    assert run(tmp_path / "out.jsonl", source, *served(other)) == 2
    assert "tokens in the text of set.jsonl:1" in capsys.readouterr().err
    assert (tmp_path / "out.jsonl").read_text() == ""


@pytest.mark.parametrize(
    ("target", "model", "fits"),
    [
        ("org/Qwen3-8B", {"id": "Qwen/qwen3-8b"}, True),
        ("/hub/models--org--Qwen3-8B/snapshots/1", {"id": "qwen3-8b"}, True),
        ("/models/Qwen3-8B", {"id": "prod", "root": "/data/Qwen3-8B"}, True),
        ("org/Qwen3-8B@main", {"id": "Qwen3-8B-Base"}, False),
    ],
)
def test_name_of_the_target_is_found_among_those_of_the_server(target, model, fits):
    models = [{"id": "first"}, model]
    choose = partial(api.choose_model, models, target=target, url="u", options=endpoint.OPTIONS)
    if fits:
        assert choose(served_model=None) == model
    else:
        with pytest.raises(endpoint.ConfigError, match="got Qwen3-8B-Base, first"):
            choose(served_model=None)
    assert choose(served_model="first") == {"id": "first"}


def test_local_answers_are_not_mixed_with_those_of_a_server(
    tmp_path, source, served, tokenizer, capsys
):
    assert run(tmp_path / "out.jsonl", source, *served(Fake(tokenizer))) == 0
    assert run(tmp_path / "out.jsonl", source, "--device", "cpu") == 2
    assert "served_model lab_tiny, now None" in capsys.readouterr().err


def test_sampling_context_and_key_reach_the_server(
    tmp_path, source, served, tokenizer, monkeypatch, capsys
):
    server = Fake(tokenizer)
    server.model["max_model_len"] = 20
    monkeypatch.setenv("A_KEY", "abc")
    words = ["--target", TARGET, "--output", str(tmp_path / "out.jsonl"), "--source", source]
    words += [*served(server), "--api-key-variable", "A_KEY", "--seed", "5", "--top-k", "7"]
    assert main([*words, "--max-new-tokens", "12"]) == 0
    body = next(body for body in server.asked if isinstance(body["prompt"], list))
    num_prompt = len(body["prompt"])
    assert (body["max_tokens"], body["seed"]) == (min(12, 20 - num_prompt), 5)
    assert body["max_tokens"] < 12, "the context must cut the answer; give it less"
    assert (body["temperature"], body["top_p"], body["top_k"]) == (0.6, 0.95, 7)
    assert body["repetition_penalty"] == 1.0
    assert server.headers[0]["authorization"] == "Bearer abc"
    assert main([*words, "--max-new-tokens", "12", "--max-model-len", "3", "--xz"]) == 0
    capsys.readouterr()


def test_answer_that_was_ended_gets_the_token_that_ended_it(tokenizer):
    reader = endpoint.Reader(tokenizer, (5, 9), 4096)
    server = endpoint.Server("u", "m", None, 1.0, None, endpoint.OPTIONS)
    work = endpoint._Work(server, endpoint.SamplingParams(), reader)
    ended = {"finish_reason": "stop"}
    usual = tokenizer.eos_token_id if tokenizer.eos_token_id in (5, 9) else 5
    assert work._ended([7], {"finish_reason": "length"}) == [7]
    assert work._ended([7], ended) == [7, usual]
    assert work._ended([7, 9], ended) == [7, 9]
    assert work._ended([7], ended | {"stop_reason": 9}) == [7, 9]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--endpoint", "server:8000"), "--endpoint must be an address"),
        (("--endpoint", "http://server:port"), "--endpoint must be an address"),
        (("--endpoint", "http://s", "--self-chat", "3"), "--self-chat must be used without"),
        (("--served-model", "x"), "--served-model must be used with --endpoint"),
        (("--endpoint", "http://s", "--api-key-variable", "NO_SUCH"), "'NO_SUCH' is not set"),
    ],
    ids=["address", "port", "local-option", "endpoint-option", "key"],
)
def test_bad_arguments_exit_with_2_and_one_line(tmp_path, source, capsys, words, message):
    assert run(tmp_path / "out.jsonl", source, *words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize(
    ("reply", "code", "message"),
    [
        ({"text": "no JSON"}, 4, "must answer with JSON objects"),
        ({"json": {"answer": 1}}, 4, "must answer with `choices`"),
        ({"json": {"choices": [{"message": {"content": "4", "reasoning": "2+2"}}]}}, 2, "parsers"),
        ({"json": {"choices": [{"token_ids": [99999]}]}}, 2, "token ids up to 99999"),
        ({"status_code": 401, "json": {"error": {"message": "no key"}}}, 2, "401 no key"),
    ],
    ids=["no-json", "no-choices", "reasoning", "vocabulary", "key"],
)
def test_answer_in_no_form_of_ours_is_one_line(
    tmp_path, source, served, tokenizer, capsys, reply, code, message
):
    server = Fake(tokenizer)
    server.script = [lambda: httpx.Response(**({"status_code": 200} | reply))]
    assert run(tmp_path / "out.jsonl", source, *served(server)) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
