import json
import lzma
from collections import Counter
from pathlib import Path

import pytest

from mtp_research.evaluation.run.prompt_files import Prompt
from mtp_research.evaluation.run.prompts import (
    CODE_CATEGORY,
    SHIPPED_PROMPTS,
    encode_prompt,
    load_prompts,
)
from mtp_research.models.target import load_tokenizer
from mtp_research.runtime.errors import ConfigError

SHARED = Path(__file__).parents[3] / "shared" / "data"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="../shared/data is not there")


@pytest.fixture(scope="module")
def shipped() -> list[Prompt]:
    return load_prompts(None)


class SpyTokenizer:
    """Encodes a character as its code point, between what its rule puts around a text."""

    bos_token_id: int | None = 0  # no tokenizer is asked for it: its rule decides
    chat_template: str | None = "some template"
    before: tuple[int, ...] = ()
    behind: tuple[int, ...] = ()

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        own = [ord(character) for character in text]
        return [*self.before, *own, *self.behind] if add_special_tokens else own

    def convert_tokens_to_ids(self, tokens: list[str]) -> list[int]:
        return [9] * len(tokens)

    def apply_chat_template(self, conversation, *, add_generation_prompt, tokenize, return_dict):
        assert add_generation_prompt
        assert tokenize
        assert not return_dict
        assert [message["role"] for message in conversation] == ["user"]
        return [7, *(ord(character) for character in conversation[0]["content"]), 8]


def test_shipped_prompts_have_four_text_domains_and_code(shipped: list[Prompt]):
    counts = Counter(prompt.category for prompt in shipped)
    assert set(counts) == {"arith", "math", "howto", "dialog", CODE_CATEGORY}
    assert all(counts[name] >= 28 for name in ("arith", "math", "howto", "dialog"))
    assert counts[CODE_CATEGORY] >= 24


def test_shipped_prompts_are_distinct_and_short(shipped: list[Prompt]):
    prompts = [prompt for prompt in shipped if prompt.format == "chat"]
    assert len({prompt.sha256 for prompt in prompts}) == len(prompts)
    assert all(10 <= len(prompt.turns[0]) <= 260 for prompt in prompts)


def test_shipped_files_follow_the_question_schema():
    for path in SHIPPED_PROMPTS.glob("*.jsonl"):
        for line in path.read_text(encoding="utf8").splitlines():
            row = json.loads(line)
            assert set(row) == {"question_id", "category", "turns", "format"}
            assert row["category"] == path.stem


@needs_shared
@pytest.mark.parametrize("split", ["train", "dev"])
@pytest.mark.parametrize("domain", ["arith", "math", "howto", "dialog"])
def test_shipped_prompts_do_not_occur_in_the_corpus(shipped: list[Prompt], domain: str, split: str):
    with lzma.open(SHARED / "corpus" / f"{domain}.{split}.jsonl.xz", "rt", encoding="utf8") as file:
        rows = [json.loads(line) for line in file]
    asked = {message["content"] for row in rows for message in row["messages"]}
    ours = {prompt.turns[0] for prompt in shipped if prompt.category == domain}
    assert ours
    assert not ours & asked


@needs_shared
@pytest.mark.parametrize(
    ("name", "num_prompts", "form"),
    [
        ("spec_bench", 480, "chat"),
        ("mt_bench/question.jsonl", 80, "chat"),
        ("eagle_eval", 160, "chat"),
        ("human_eval", 164, "completion"),
        ("gsm8k/test.jsonl", 1319, "chat"),
        ("aqua", 254, "chat"),
        ("self_instruct", 427, "chat"),
    ],
)
def test_public_sets_load_by_path(name: str, num_prompts: int, form: str):
    prompts = load_prompts(str(SHARED / name))
    assert len(prompts) == num_prompts
    assert {prompt.format for prompt in prompts} == {form}


def test_max_prompts_is_balanced_over_categories():
    counts = Counter(prompt.category for prompt in load_prompts(None, max_prompts=17))
    assert sorted(counts.values()) == [3, 3, 3, 4, 4]


def test_max_prompts_subsets_are_nested_and_keep_the_order(shipped: list[Prompt]):
    small, large = (load_prompts(None, max_prompts=n, seed=3) for n in (12, 40))
    assert set(small) < set(large)
    assert large == [prompt for prompt in shipped if prompt in set(large)]


def test_max_prompts_seed_selects_other_prompts():
    first, again, other = (load_prompts(None, max_prompts=20, seed=s) for s in (0, 0, 1))
    assert first == again
    assert first != other


def test_max_prompts_zero_is_refused():
    with pytest.raises(ConfigError, match=r"prompts\.max_prompts must be >= 1, got 0"):
        load_prompts(None, max_prompts=0)


def test_missing_path_names_the_key():
    with pytest.raises(ConfigError, match=r"prompts\.path .*'/nowhere/at/all'"):
        load_prompts("/nowhere/at/all")


def test_hash_covers_format_and_text_only():
    prompt = Prompt("a", "x", ("text",), "chat")
    assert prompt.sha256 == Prompt("b", "y", ("text",), "chat").sha256
    assert prompt.sha256 != Prompt("a", "x", ("text",), "completion").sha256
    assert prompt.sha256 != Prompt("a", "x", ("text ",), "chat").sha256


def test_chat_prompt_goes_through_the_template():
    prompt = Prompt("a", "x", ("hi",), "chat")
    assert encode_prompt(prompt, SpyTokenizer()) == (7, ord("h"), ord("i"), 8)


@pytest.mark.parametrize("before", [(), (0,), (5, 6)])
@pytest.mark.parametrize("behind", [(), (1,)])
def test_completion_prompt_begins_as_the_tokenizer_rule_says_and_has_no_end(
    before: tuple[int, ...], behind: tuple[int, ...]
):
    tokenizer = SpyTokenizer()
    tokenizer.before, tokenizer.behind, tokenizer.chat_template = before, behind, None
    prompt = Prompt("a", "x", ("ab",), "completion")
    assert encode_prompt(prompt, tokenizer) == (*before, ord("a"), ord("b"))


def test_text_that_spells_its_beginning_gets_no_other():
    tokenizer = SpyTokenizer()
    tokenizer.before = (ord("<"),)
    assert encode_prompt(Prompt("a", "x", ("<a",), "completion"), tokenizer) == (60, 97)


def test_completion_prompt_of_a_lab_target_begins_with_bos():
    """Its tokenizer has no rule, but every text that it was trained on began with the token."""
    tokenizer = load_tokenizer("assets/lab_tiny/target")
    assert tokenizer.encode("a", add_special_tokens=True) == tokenizer.encode(
        "a", add_special_tokens=False
    )
    found = encode_prompt(Prompt("a", "x", ("def f",), "completion"), tokenizer)
    assert found == (0, *tokenizer.encode("def f", add_special_tokens=False))


def test_transformers_tokenizer_gives_the_chat_form():
    """The real object, with the project's chat form; the text itself becomes one unknown token."""
    transformers = pytest.importorskip("transformers")
    words = {"<|bos|>": 0, "<|user|>": 1, "<|assistant|>": 2, "<|end|>": 3, "?": 4}
    model = pytest.importorskip("tokenizers").models.WordLevel(words, unk_token="?")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=pytest.importorskip("tokenizers").Tokenizer(model),
        bos_token="<|bos|>",
        additional_special_tokens=["<|user|>", "<|assistant|>", "<|end|>"],
        chat_template=(
            "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>"
            "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
        ),
    )
    assert encode_prompt(Prompt("a", "x", ("hi",), "chat"), tokenizer) == (0, 1, 4, 3, 2)
    assert encode_prompt(Prompt("a", "x", ("hi",), "completion"), tokenizer) == (4,)


def test_chat_prompt_without_template_is_refused():
    tokenizer = SpyTokenizer()
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="no chat template"):
        encode_prompt(Prompt("a", "x", ("hi",), "chat"), tokenizer)
