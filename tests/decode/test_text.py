"""Text in, text out: prompts in words, the words of outputs and streams, and what is refused."""

import asyncio
import copy
import dataclasses
import pickle
import shutil
from pathlib import Path

import pytest

from mtp_research import (
    AsyncDecoder,
    EngineConfig,
    SamplingParams,
    SpecDecoder,
    SpecSettings,
    load_heads,
    load_target,
)
from mtp_research.decode.schedule.request import Request, RequestFeed, Status
from mtp_research.models.target import load_tokenizer
from mtp_research.runtime.errors import ArgumentTypeError, ConfigError
from tests import tiny

LAB_TINY = Path(__file__).resolve().parents[2] / "assets" / "lab_tiny"
QUESTION = [{"role": "user", "content": "What is 2 + 3?"}]
CODE = "def add(a, b):\n"
THREE = SpecSettings(num_speculative_tokens=3)


@pytest.fixture(scope="module")
def target():
    return load_target(LAB_TINY / "target", dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(LAB_TINY / "target")


@pytest.fixture
def decoder(target) -> SpecDecoder:
    return SpecDecoder(target, load_heads(LAB_TINY / "heads" / "chain_n3", target), spec=THREE)


def test_words_and_ids_in_one_batch_give_what_their_ids_give(decoder, tokenizer) -> None:
    code = [tokenizer.bos_token_id, *tokenizer.encode(CODE, add_special_tokens=False)]
    asked = tokenizer.apply_chat_template(
        QUESTION, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    outputs = list(decoder.generate([CODE, QUESTION, code, asked], max_new_tokens=24))
    by_id = {output.request_id: output for output in outputs}
    assert by_id["0"].token_ids == by_id["2"].token_ids
    assert by_id["1"].token_ids == by_id["3"].token_ids
    assert by_id["0"].token_ids != by_id["1"].token_ids
    for output in outputs:
        assert output.token_ids == output.output_token_ids
        plain = tokenizer.decode(list(output.token_ids), skip_special_tokens=True)
        assert output.text == plain != ""


def test_stream_says_the_text_of_the_output(decoder) -> None:
    (output,) = decoder.generate([QUESTION], max_new_tokens=48)
    sampling = decoder.usual_sampling(48)
    events = list(decoder.stream(QUESTION, sampling=sampling))
    assert len(events) > 5
    assert "".join(event.text for event in events) == output.text
    assert tuple(token for event in events for token in event.token_ids) == output.token_ids


def test_async_streams_say_the_text_even_of_merged_events(decoder) -> None:
    (output,) = decoder.generate([CODE], max_new_tokens=48)

    async def read() -> list[str]:
        async with AsyncDecoder(decoder) as server:
            texts = []
            async for event in server.generate(CODE, sampling=decoder.usual_sampling(48)):
                texts.append(event.text)
                await asyncio.sleep(0.15)  # several steps a look
            return texts

    texts = asyncio.run(read())
    assert "".join(texts) == output.text
    assert len(texts) < len(output.num_accepted_per_round)


def test_stop_token_of_the_target_ends_a_stream_and_is_not_in_its_text(target, tokenizer) -> None:
    decoder = SpecDecoder(target, "null", spec=THREE)
    (output,) = decoder.generate([QUESTION], max_new_tokens=8)
    stopping = decoder.usual_sampling(8)
    assert set(stopping.stop_token_ids) == set(target.stop_token_ids) != set()
    # The shipped model rarely stops: the text of a stop token is what matters here.
    spoken = target.decode([*output.token_ids, target.stop_token_ids[0]])
    assert spoken == output.text
    assert tokenizer.decode([target.stop_token_ids[0]]) not in spoken


@pytest.mark.parametrize("text", ["naïve — 你好 🙂!", "\ufffd x \ufffd", "é"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_events_never_cut_a_character(tokenizer, text: str, size: int) -> None:
    written = tokenizer.encode(text, add_special_tokens=False) * 30  # longer than the context
    request = Request("a", (5, 6), SamplingParams(), decode=tokenizer.decode)
    feed, spoken = RequestFeed(request), ""
    for start in range(0, len(written), size):
        request.token_ids += written[start : start + size]
        if start + size >= len(written):
            request.status = Status.FINISHED
        event = feed.read()
        assert event.token_ids == tuple(written[start : start + size])
        assert "\ufffd" in text or "\ufffd" not in event.text
        spoken += event.text
    assert spoken == text * 30


def test_text_that_spells_its_bos_gets_no_second_one(target, tokenizer) -> None:
    with_bos = target.encode(f"{tokenizer.bos_token}abc")
    assert with_bos == target.encode("abc")
    assert with_bos.count(tokenizer.bos_token_id) == 1


def test_token_ids_need_no_tokenizer_and_text_says_what_is_missing(tmp_path: Path) -> None:
    folder = tmp_path / "bare"
    shutil.copytree(LAB_TINY / "target", folder, ignore=shutil.ignore_patterns("*token*"))
    decoder = SpecDecoder(load_target(folder, dtype="float32", device="cpu"), "null", spec=THREE)
    (output,) = decoder.generate([[0, 3, 100]], max_new_tokens=4)
    assert len(output.token_ids) == 4
    with pytest.raises(ConfigError, match=r"without one in .*bare.*copy .* or pass token ids"):
        _ = output.text
    with pytest.raises(ConfigError, match="needs a tokenizer"):
        list(decoder.generate(["text"]))
    assert not decoder.has_work


def test_target_in_memory_takes_token_ids_alone() -> None:
    decoder = SpecDecoder(tiny.tiny_target("qwen3"), "null", spec=THREE)
    with pytest.raises(ConfigError, match=r"built in memory.*pass token ids.*load_target\(PATH\)"):
        decoder.add_request("text")
    assert len(next(decoder.generate([[5]], max_new_tokens=3)).token_ids) == 3


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ("one text", r"prompts must be a list of prompts.*generate\(\[PROMPT\]\)"),
        (b"bytes", "prompts must be a list of prompts"),
        (7, "prompts must be a list of prompts"),
        ([1, 2], "the prompt must be text, a sequence of token ids"),
        (QUESTION, "put a single message in a list"),
        ([[{"role": "user"}]], 'must be {"role": TEXT, "content": TEXT}'),
        ([[*QUESTION, "and"]], 'must be {"role": TEXT, "content": TEXT}'),
        ([[0.5]], "a token id of the prompt must be an integer"),
    ],
)
def test_wrong_prompt_is_a_type_error_that_says_what_to_write(decoder, prompts, message) -> None:
    with pytest.raises(TypeError, match=message) as refused:
        list(decoder.generate(prompts))
    assert isinstance(refused.value, ArgumentTypeError)
    assert isinstance(refused.value, ConfigError)
    assert not decoder.has_work


def test_messages_that_the_template_refuses_are_named(decoder) -> None:
    with pytest.raises(ConfigError, match="expected roles user and assistant, got system"):
        decoder.add_request([{"role": "system", "content": "x"}])


def test_tokenizer_without_a_template_takes_text_and_no_messages(tmp_path: Path) -> None:
    folder = tmp_path / "plain"
    shutil.copytree(LAB_TINY / "target", folder)
    config = folder / "tokenizer_config.json"
    lines = config.read_text(encoding="utf8").splitlines(keepends=True)
    config.write_text("".join(line for line in lines if "chat_template" not in line))
    target = load_target(folder, dtype="float32", device="cpu")
    assert len(target.encode("abc")) > 1
    with pytest.raises(ConfigError, match="needs a chat template"):
        target.encode(QUESTION)


def test_output_that_finished_while_the_caller_ran_steps_is_not_lost(target) -> None:
    engine = EngineConfig(max_num_requests=1)  # the stream waits until all others are done
    decoder = SpecDecoder(target, "null", spec=THREE, engine=engine)
    seen = []
    for output in decoder.generate([[0, 5], [0, 6], [0, 7]], max_new_tokens=2):
        seen.append(output.request_id)
        list(decoder.stream([0, 8], sampling=decoder.usual_sampling(2)))
    assert seen == ["0", "1", "2"]


def test_copies_and_fields_of_an_output_do_not_drag_the_model_along(decoder) -> None:
    (output,) = decoder.generate([CODE], max_new_tokens=4)
    assert "Target" not in str(dataclasses.asdict(output))
    assert len(pickle.dumps(output)) < 2000
    for other in (pickle.loads(pickle.dumps(output)), copy.deepcopy(output)):
        assert other == output
        with pytest.raises(ConfigError, match=r"target\.decode\(record\.token_ids\)"):
            _ = other.text


def test_repr_of_a_request_is_one_line_that_tells_how_far_it_is(decoder) -> None:
    request = decoder.add_request([5, 6, 7], sampling=SamplingParams(max_new_tokens=9))
    assert repr(request) == "Request('request-0', 3 prompt tokens, 0 tokens, waiting)"
    decoder.step()
    num_tokens = len(request.output_token_ids)
    assert repr(request) == f"Request('request-0', 3 prompt tokens, {num_tokens} tokens, running)"
    while decoder.has_work:
        decoder.step()
    assert repr(request) == "Request('request-0', 3 prompt tokens, 9 tokens, length)"


def test_reprs_are_one_short_line(decoder) -> None:
    outputs = list(decoder.generate([CODE, QUESTION], max_new_tokens=40))
    for value, expected in [
        (decoder.target, "3.9 M parameters, float32 on cpu"),
        (decoder.drafter.heads, "MTPHeads(3 modules, chain unroll"),
        (decoder, "SpecDecoder(K=3, policy='training'"),
        (outputs[0], "40 tokens, length, acceptance length"),
        (decoder.stats, "DecodeStats(2 requests, 80 tokens"),
        (decoder.auditor, "0 WRONG, 0 MIXED, 0 HOLE in"),
    ]:
        assert expected in repr(value)
        assert len(repr(value)) < 300
        assert "\n" not in repr(value)
    assert "<Verdict" not in repr(decoder.auditor.totals)
    assert "WRONG: 0" in repr(decoder.auditor.totals)


def test_error_of_a_call_names_the_argument_of_that_call(target) -> None:
    with pytest.raises(ConfigError, match=r"model\.dtype must be one of") as refused:
        load_target(LAB_TINY / "target", dtype="float33")
    assert refused.value.__notes__ == ["In Python: model.dtype is load_target(dtype=...)."]
    with pytest.raises(ConfigError, match="set num_speculative_tokens") as refused:
        SpecSettings(num_speculative_tokens=99)
    assert not hasattr(refused.value, "__notes__")
    assert "spec.k" in str(refused.value)
