"""Byte-level BPE with cheap code, and the chat form that every document takes as token ids.

Second stage of the data flow: sources -> tokenizer -> packing. Ids 0 to 5 are the special tokens. A
conversation becomes `<|bos|><|user|>CONTENT<|end|><|assistant|>CONTENT<|end|>...`, plain text
`<|bos|>TEXT<|eos|>`; special tokens are placed by id, so text that spells one stays text.

Source: byte-level BPE as in GPT-2; digits split singly as in Llama; our own split pattern below.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from mtp_research.data.packing import EncodedDocument
from mtp_research.data.prompt_text import SPECIAL_TOKENS
from mtp_research.data.sources import Document, hash_of
from mtp_research.runtime.errors import ConfigError

BOS_ID, EOS_ID, PAD_ID, USER_ID, ASSISTANT_ID, END_ID = range(len(SPECIAL_TOKENS))
STOP_IDS = (EOS_ID, END_ID)
ROLE_IDS = {"user": USER_ID, "assistant": ASSISTANT_ID}

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] not in ['user', 'assistant'] %}"
    "{{ raise_exception('expected roles user and assistant, got ' + message['role']) }}{% endif %}"
    "{{ '<|' + message['role'] + '|>' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|end|>' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

# Alternatives in order of preference. A newline keeps the indentation after it, so that the line
# structure of code costs one token a line and a prompt that ends with a colon is cut at a boundary
# which training has seen; one space or one underscore belongs to the word after it.
_SPLIT_PATTERN = "|".join(
    (
        r"'(?:s|t|re|ve|m|ll|d)\b",
        r" ?_?\p{L}+",
        r"\p{N}",
        r" ?[^\s\p{L}\p{N}]+",
        r"[\r\n]+[ \t]*",
        r"[ \t]+(?= \S)",
        r"[ \t]+",
        r"\s",
    )
)
_DOCUMENTS_PER_CALL = 2048  # bounds memory: encodings are far larger than ids
_SAMPLE_BYTES = 20_000_000
_SAMPLE_BYTES_PER_DOCUMENT = 20_000


def train_tokenizer(documents: Sequence[Document], *, vocab_size: int) -> Tokenizer:
    """Train byte-level BPE on about 20 MB of documents, in which every domain has the same share.

    `vocab_size` is at least 262: 256 bytes and 6 special tokens.
    """
    smallest = len(SPECIAL_TOKENS) + len(pre_tokenizers.ByteLevel.alphabet())
    if vocab_size < smallest:
        raise ConfigError(
            f"model.pretrain.vocab_size must be at least {smallest}, got {vocab_size}; raise it"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_balanced_sample(documents), trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: str | Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json` (chat template inside) into `folder`."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=SPECIAL_TOKENS[BOS_ID],
        eos_token=SPECIAL_TOKENS[EOS_ID],
        pad_token=SPECIAL_TOKENS[PAD_ID],
        additional_special_tokens=list(SPECIAL_TOKENS[USER_ID:]),
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
    # Inside tokenizer_config.json, not in a file of its own: older readers look only there.
    wrapped.save_pretrained(folder, save_jinja_files=False)


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """The tokenizer saved in `folder`, whose special tokens must be at ids 0 to 5."""
    path = Path(folder) / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"expected a tokenizer at {path}, which does not exist; fix model.path")
    return _backend(Tokenizer.from_file(str(path)))


def encode_document(
    document: Document, tokenizer: Tokenizer | PreTrainedTokenizerFast
) -> EncodedDocument:
    """Token ids of `document` in its chat or plain form; see `encode_documents`."""
    return next(iter(encode_documents([document], tokenizer)))


def encode_documents(
    documents: Sequence[Document], tokenizer: Tokenizer | PreTrainedTokenizerFast
) -> Iterator[EncodedDocument]:
    """Token ids and loss masks of `documents`, in order; text is encoded on all cores at once.

    The loss mask is True where the token is the target's own output: the content of an assistant
    turn and the `<|end|>` that closes it; all tokens but `<|bos|>` in plain text.
    """
    backend = _backend(tokenizer)
    for first in range(0, len(documents), _DOCUMENTS_PER_CALL):
        chunk = documents[first : first + _DOCUMENTS_PER_CALL]
        texts = [text for document in chunk for text in document.texts]
        encodings = iter(_encode_texts(texts, backend))
        for document in chunk:
            yield _assemble(document, [next(encodings) for _ in document.texts])


def prompt_ids(messages: Sequence[tuple[str, str]], tokenizer: Tokenizer) -> list[int]:
    """Token ids of a conversation that the assistant is to continue, ending in `<|assistant|>`."""
    document = Document(doc_id="prompt", domain="prompt", messages=tuple(messages))
    return [*encode_document(document, tokenizer).token_ids, ASSISTANT_ID]


def _encode_texts(texts: list[str], backend: Tokenizer) -> list[list[int]]:
    was_plain = backend.encode_special_tokens
    backend.encode_special_tokens = True  # text that spells a special token must stay text
    try:
        encodings = backend.encode_batch_fast(texts, add_special_tokens=False)
    finally:
        backend.encode_special_tokens = was_plain
    return [encoding.ids for encoding in encodings]


def _assemble(document: Document, pieces: list[list[int]]) -> EncodedDocument:
    token_ids, loss_mask = [BOS_ID], [False]
    if document.messages is None:
        token_ids += [*pieces[0], EOS_ID]
        loss_mask += [True] * (len(pieces[0]) + 1)
    else:
        for (role, _), piece in zip(document.messages, pieces, strict=True):
            token_ids += [_role_id(role, document.doc_id), *piece, END_ID]
            loss_mask += [False] + [role == "assistant"] * (len(piece) + 1)
    return EncodedDocument(
        doc_id=document.doc_id,
        domain=document.domain,
        token_ids=tuple(token_ids),
        loss_mask=tuple(loss_mask),
    )


def _role_id(role: str, doc_id: str) -> int:
    if role not in ROLE_IDS:
        raise ConfigError(
            f"expected roles {sorted(ROLE_IDS)}, got {role!r} in document {doc_id!r}; "
            "merge other roles into the user turn"
        )
    return ROLE_IDS[role]


def _backend(tokenizer: Tokenizer | PreTrainedTokenizerFast) -> Tokenizer:
    backend = tokenizer if isinstance(tokenizer, Tokenizer) else tokenizer.backend_tokenizer
    found = [backend.token_to_id(token) for token in SPECIAL_TOKENS]
    if found != list(range(len(SPECIAL_TOKENS))):
        raise ConfigError(
            f"expected the special tokens {' '.join(SPECIAL_TOKENS)} at ids 0 to 5, got ids "
            f"{found}; use a target made by task=target"
        )
    return backend


def _balanced_sample(documents: Sequence[Document]) -> Iterable[str]:
    """Texts of equal size per domain; what small domains leave goes to the larger ones."""
    by_domain: dict[str, list[Document]] = defaultdict(list)
    for document in documents:
        by_domain[document.domain].append(document)
    sizes = {
        domain: sum(len(text) for document in members for text in document.texts)
        for domain, members in by_domain.items()
    }
    budget = _SAMPLE_BYTES
    for index, domain in enumerate(sorted(sizes, key=lambda name: (sizes[name], name))):
        share = budget // (len(sizes) - index)
        for document in sorted(by_domain[domain], key=lambda document: hash_of(document.doc_id)):
            for text in document.texts:
                piece = text[: min(share, _SAMPLE_BYTES_PER_DOCUMENT)]
                share -= len(piece)
                budget -= len(piece)
                yield piece
            if share <= 0:
                break
