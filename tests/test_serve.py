"""`examples.serve` before a client of another project: texts, streams, faults, counters."""

import http.client
import json
import re
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from examples.serve import Server, load_server
from mtp_research import SpecDecoder, SpecSettings, load_heads, load_target
from mtp_research.decode.stats import RequestRecord
from mtp_research.runtime.errors import ConfigError
from tests.serving import Running

LAB_TINY = Path(__file__).resolve().parents[1] / "assets" / "lab_tiny"
CODE = "def add(a, b):\n"
QUESTION = [{"role": "user", "content": "How do I boil an egg?"}]
GREEDY: dict[str, Any] = {"model": "lab_tiny", "temperature": 0}


class Counted(Running):
    """A server whose counters are read."""

    def counters(self) -> dict[str, float]:
        """Values by name without `vllm:` and the labels that all have."""
        status, text = self.ask("GET", "/metrics")
        assert status == 200
        values = {}
        for line in text.splitlines():
            if found := re.fullmatch(
                r'vllm:(\w+)\{model_name="lab_tiny",engine="0"(.*)\} (.+)', line
            ):
                values[found[1] + found[2]] = float(found[3])
            else:
                assert line.startswith("# TYPE vllm:"), line
        return values


@pytest.fixture(scope="module")
def server() -> Server:
    words = ["model=lab_tiny", "model.device=cpu", "model.dtype=float32", "spec.k=3"]
    return load_server([*words, "engine.max_num_requests=4", "engine.max_model_len=512"])


@pytest.fixture(scope="module")
def running(server: Server) -> Iterator[Counted]:
    running = Counted(server.answer)
    yield running
    running.stop()


@pytest.fixture(scope="module")
def client(running: Running) -> Any:
    openai = pytest.importorskip("openai")
    return openai.OpenAI(
        base_url=f"http://127.0.0.1:{running.port}/v1", api_key="none", max_retries=0
    )


@pytest.fixture(scope="module")
def offline() -> SpecDecoder:
    target = load_target(LAB_TINY / "target", dtype="float32", device="cpu")
    heads = load_heads(LAB_TINY / "heads" / "chain_n3", target)
    return SpecDecoder(target, heads, spec=SpecSettings(num_speculative_tokens=3))


@pytest.fixture(scope="module")
def expected(offline: SpecDecoder) -> dict[str, RequestRecord]:
    records = offline.generate([CODE, QUESTION], max_new_tokens=40)
    by_id = {record.request_id: record for record in records}
    return {"code": by_id["0"], "question": by_id["1"]}


def test_completion_is_what_the_decoder_writes(client: Any, expected: dict) -> None:
    found = client.completions.create(prompt=CODE, max_tokens=40, **GREEDY)
    assert found.choices[0].text == expected["code"].text
    assert found.choices[0].finish_reason == expected["code"].finish_reason
    assert found.usage.prompt_tokens == expected["code"].num_prompt_tokens
    assert found.usage.completion_tokens == len(expected["code"].token_ids)
    assert [model.id for model in client.models.list()] == ["lab_tiny"]


def test_streamed_completion_gives_the_same_text_and_the_usage(client: Any, expected: dict) -> None:
    options = {"include_usage": True}
    parts = list(
        client.completions.create(
            prompt=CODE, max_tokens=40, stream=True, stream_options=options, **GREEDY
        )
    )
    assert "".join(part.choices[0].text for part in parts[:-1]) == expected["code"].text
    assert [part.choices[0].finish_reason for part in parts[:-2]] == [None] * (len(parts) - 2)
    assert parts[-2].choices[0].finish_reason == expected["code"].finish_reason
    assert parts[-1].usage.completion_tokens == len(expected["code"].token_ids)
    assert len(parts) > 5


def test_chat_whole_and_streamed(client: Any, expected: dict) -> None:
    asked = {"messages": QUESTION, "max_completion_tokens": 40, **GREEDY}
    whole = client.chat.completions.create(**asked)
    assert whole.choices[0].message.content == expected["question"].text
    assert whole.choices[0].message.role == "assistant"
    parts = [part.choices[0] for part in client.chat.completions.create(stream=True, **asked)]
    assert "".join(part.delta.content or "" for part in parts) == expected["question"].text
    assert [part.delta.role for part in parts] == ["assistant"] + [None] * (len(parts) - 1)
    assert parts[-1].finish_reason == expected["question"].finish_reason
    pieces = [{"type": "text", "text": QUESTION[0]["content"]}]
    asked["messages"] = [{"role": "user", "content": pieces}]
    again = client.chat.completions.create(**asked)
    assert again.choices[0].message.content == expected["question"].text


def test_many_prompts_and_many_clients(client: Any, expected: dict, offline: SpecDecoder) -> None:
    ids = list(offline.target.encode(QUESTION))
    asked = {"max_tokens": 40, **GREEDY}
    both = client.completions.create(prompt=[CODE, CODE], **asked)
    assert [choice.text for choice in both.choices] == [expected["code"].text] * 2
    for prompt in (ids, [ids]):
        found = client.completions.create(prompt=prompt, **asked)
        assert found.choices[0].text == expected["question"].text
    streamed = ["", ""]
    for part in client.completions.create(prompt=[CODE, "Tea"], stream=True, **asked):
        streamed[part.choices[0].index] += part.choices[0].text
    assert streamed[0] == expected["code"].text
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(client.completions.create, prompt=CODE, **asked) for _ in "ab"]
        assert {call.result().choices[0].text for call in calls} == {expected["code"].text}


def test_seeds_and_defaults_sample(client: Any) -> None:
    def sampled(seed: int) -> str:
        found = client.completions.create(model="lab_tiny", prompt=CODE, seed=seed, top_p=0.9)
        assert found.usage.completion_tokens <= 16
        return found.choices[0].text

    assert sampled(1) == sampled(1)
    assert len({sampled(seed) for seed in range(4)}) > 1


def test_bad_requests_are_answered_by_openais_error(client: Any) -> None:
    openai = pytest.importorskip("openai")
    with pytest.raises(openai.BadRequestError) as fault:
        client.completions.create(model="lab_tiny", prompt="x", stop=["\n"])
    assert "set stop_token_ids" in fault.value.message
    assert fault.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model="lab_tiny", prompt="x", temperature=-1, stream=True)
    with pytest.raises(openai.NotFoundError, match="model must be lab_tiny"):
        client.completions.create(model="gpt", prompt="x")


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("{", "must be JSON"),
        ([], "must be a JSON object, got a list"),
        ({}, "prompt must be given"),
        ({"prompt": "x", "n": 2}, "n must be 1"),
        ({"prompt": "x", "logprobs": 3}, "logprobs must be false"),
        ({"prompt": "x", "tools": [1]}, "tools is not supported"),
        ({"prompt": "x", "stop_token_ids": 3}, "stop_token_ids must be a list"),
        ({"prompt": "x", "stop_token_ids": ["a"]}, "stop_token_ids"),
        ({"prompt": "x", "stream_options": "all"}, "stream_options must be an object"),
        ({"prompt": "x", "max_tokens": "many"}, "max_new_tokens"),
        ({"prompt": [10**9]}, "prompt token ids must be in"),
        ({"prompt": {"a": 1}}, "the prompt must be text"),
        ({"prompt": [1] * 600}, "600"),
        ({"prompt": "\ud800"}, "lone surrogates"),
    ],
    ids=str,
)
def test_bad_body_is_refused_in_one_line(running: Running, body: object, expected: str) -> None:
    status, text = running.ask("POST", "/v1/completions", body)
    error = json.loads(text)["error"]
    assert (status, error["code"]) == (400, 400)
    assert expected in error["message"]
    assert "\n" not in error["message"]


@pytest.mark.parametrize("messages", ["x", [1], [{"role": "user"}], [{"content": "x"}], []])
def test_bad_messages_are_refused(running: Running, messages: object) -> None:
    status, _ = running.ask("POST", "/v1/chat/completions", {"messages": messages})
    assert status == 400


@pytest.mark.parametrize(
    "sent",
    [b"hello\r\n\r\n", b"POST /v1/completions HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
     b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", b"x" * (1 << 18)],
    ids=["no request", "negative length", "chunked body", "endless head"],
)  # fmt: skip
def test_what_is_no_request_is_answered_and_closed(running: Running, sent: bytes) -> None:
    with socket.create_connection(("127.0.0.1", running.port), timeout=20) as connection:
        connection.sendall(sent)
        with suppress(ConnectionResetError):  # closed before all of it was read
            assert connection.makefile("rb").read().startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert running.ask("GET", "/health")[0] == 200


def test_other_paths(running: Running) -> None:
    assert running.ask("GET", "/health") == (200, "")
    assert running.ask("GET", "/v1/completions")[0] == 404
    assert running.ask("POST", "/v1/embeddings", {})[0] == 404


def test_metrics_are_the_decoders_counters(
    running: Counted, server: Server, offline: SpecDecoder
) -> None:
    before, told = running.counters(), len(offline.stats.records)
    for prompt in (CODE, "Tea", CODE + CODE):
        body = {**GREEDY, "prompt": prompt, "max_tokens": 30}
        assert running.ask("POST", "/v1/completions", body)[0] == 200
    after = running.counters()
    grown = {name: value - before.get(name, 0) for name, value in after.items()}
    list(offline.generate([CODE, "Tea", CODE + CODE], max_new_tokens=30))
    records = offline.stats.records[told:]
    del offline.stats.records[:told]
    counts = offline.stats.acceptance
    assert grown["spec_decode_num_drafts_total"] == counts.num_rounds > 0
    assert grown["spec_decode_num_draft_tokens_total"] == sum(counts.num_drafted)
    assert grown["spec_decode_num_accepted_tokens_total"] == sum(counts.num_accepted) > 0
    for position, count in enumerate(counts.num_accepted):
        name = f'spec_decode_num_accepted_tokens_per_pos_total,position="{position}"'
        assert grown[name] == count
    assert grown["prompt_tokens_total"] == sum(one.num_prompt_tokens for one in records)
    assert grown["generation_tokens_total"] == sum(len(one.token_ids) for one in records)
    assert after["generation_tokens_total"] == server.decoder.stats.num_emitted_tokens
    assert grown["time_to_first_token_seconds_count"] == len(records)
    assert grown['time_to_first_token_seconds_bucket,le="+Inf"'] == len(records)
    assert grown["time_to_first_token_seconds_sum"] > 0
    assert after["num_requests_running"] == after["num_requests_waiting"] == 0
    assert server.decoder.stats.records == []


def test_client_that_leaves_aborts_its_request(running: Counted, server: Server) -> None:
    name = 'request_success_total,finished_reason="abort"'
    before = running.counters().get(name, 0)
    connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=60)
    body = {**GREEDY, "prompt": CODE, "max_tokens": 480, "ignore_eos": True, "stream": True}
    connection.request("POST", "/v1/completions", json.dumps(body))
    answer = connection.getresponse()
    assert answer.readline().startswith(b"data: ")
    assert running.counters()["num_requests_running"] == 1
    answer.close()
    connection.close()
    limit = time.monotonic() + 20
    while running.counters()["num_requests_running"] and time.monotonic() < limit:
        time.sleep(0.05)
    while server.decoder.has_work and time.monotonic() < limit:
        time.sleep(0.05)
    assert running.counters()[name] == before + 1
    server.decoder.check_integrity()


def test_server_takes_one_condition() -> None:
    with pytest.raises(ConfigError, match="expected one condition, got 2"):
        load_server(["spec.policy=[eagle,training]"])


def test_server_is_small() -> None:
    root = Path(__file__).resolve().parents[1] / "examples"
    for name in ("serve", "serve_protocol"):
        lines = (root / f"{name}.py").read_text(encoding="utf8").splitlines()
        assert len(lines) <= 200, f"{name}.py has {len(lines)} lines"
