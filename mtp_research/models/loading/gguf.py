"""A target in one GGUF file, unpacked once into a folder that every other reader understands.

transformers reads the file and gives its weights back as plain numbers. They are stored as
bfloat16, with the tokenizer and the chat template, in the user's cache folder; `gguf.json` beside
them says what the file was, so that a table can name it: weights that were packed into four bits
are not those of the original release.
"""

import json
import os
import shutil
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from mtp_research.models.loading.load_weights import quiet_loading
from mtp_research.models.loading.source import GGUF_FACTS, check_source, gguf_folder, is_gguf
from mtp_research.runtime.errors import IntegrityError
from mtp_research.runtime.files import open_to_others, sha256_of

_DTYPE = torch.bfloat16
# Fields of the file -> names of the tokenizer's special tokens
_SPECIAL_TOKENS = {
    "tokenizer.ggml.bos_token_id": "bos_token",
    "tokenizer.ggml.eos_token_id": "eos_token",
    "tokenizer.ggml.unknown_token_id": "unk_token",
    "tokenizer.ggml.padding_token_id": "pad_token",
}
_BOS_RULE = "tokenizer.ggml.add_bos_token"
# llama.cpp puts the begin token before a text of these where a file does not say: SentencePiece
# vocabularies, and the byte-level ones that share Llama 3's pattern (src/llama-vocab.cpp).
_BEGUN_MODELS = ("llama",)
_BEGUN_PATTERNS = (
    *("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
)


def unpacked(path: str) -> str:
    """The folder of a target: of a `.gguf` file the unpacked one, any other path as it is.

    The first call for a file takes seconds a gigabyte and twice the room of its parameters.

    Raises:
        ConfigError: there is no such file.
        EnvironmentFault: the package gguf is missing.
        IntegrityError: the file is damaged, or of a model that transformers cannot read.
    """
    if not is_gguf(path):
        return path
    check_source(path)
    folder = gguf_folder(path)
    if not (folder / GGUF_FACTS).is_file():
        folder.parent.mkdir(parents=True, exist_ok=True)
        _unpack(Path(path), folder)
    return str(folder)


def _unpack(file: Path, folder: Path) -> None:
    unfinished = folder.with_name(f"{folder.name}.{os.getpid()}.tmp")
    try:
        # The library's readers raise whatever a damaged header leads them to.
        try:
            facts = _write(file, unfinished)
        except Exception as fault:
            reason = " ".join(str(fault).split()) or type(fault).__name__
            raise IntegrityError(
                f"model.path {str(file)!r} must be a whole GGUF file of a model that transformers "
                f"reads, got: {reason[:300]}; fetch it again, or set model.path to a folder."
            ) from fault
        (unfinished / GGUF_FACTS).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf8")
        with suppress(OSError):  # another process was first; its folder is as good
            unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _write(file: Path, folder: Path) -> dict[str, object]:
    from gguf import GGUFReader  # of the extra `gguf`

    reader = GGUFReader(file)
    with quiet_loading():
        model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=_DTYPE)
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    # The weights are plain now; a config that says otherwise would have them unpacked again.
    vars(model).update(hf_quantizer=None, is_quantized=False)
    del model.config.quantization_config
    _name_special_tokens(tokenizer, reader)
    if _begins_text(reader):
        tokenizer.add_bos_token = True  # also of the rule that tokenizer.json holds
    tokenizer.clean_up_tokenization_spaces = False  # it would cost spaces of the text
    with quiet_loading():
        model.save_pretrained(folder)
        open_to_others(*folder.glob("*.safetensors"))
        tokenizer.save_pretrained(folder)
    return {
        "file": file.name,
        "sha256": sha256_of(file),
        "num_tensors_by_type": dict(Counter(t.tensor_type.name for t in reader.tensors)),
        "stored_as": str(_DTYPE).removeprefix("torch."),
    }


def _name_special_tokens(tokenizer: PreTrainedTokenizerBase, reader: Any) -> None:
    """As the file says: transformers 5.17 to 5.23 takes the end token from the begin token's id."""
    for name, special in _SPECIAL_TOKENS.items():
        field = reader.get_field(name)
        if field is not None:
            setattr(tokenizer, special, tokenizer.convert_ids_to_tokens(int(field.contents())))


def _begins_text(reader: Any) -> bool:
    """Whether the begin token stands before a text; transformers does not read what a file says."""
    said, model, pattern = (
        None if field is None else field.contents()
        for field in map(
            reader.get_field, (_BOS_RULE, "tokenizer.ggml.model", "tokenizer.ggml.pre")
        )
    )
    if said is None:
        return model in _BEGUN_MODELS or pattern in _BEGUN_PATTERNS
    return bool(said)
