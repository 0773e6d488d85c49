"""Beside the loss of a target in pretraining: dev losses, sample texts, and the load of experts.

`evaluate_target` runs after the training loop on the weights as they are shipped (rounded to bf16).

`ExpertBalancer` balances routers that choose by score plus bias, without an auxiliary loss: after
each optimizer step the bias of an expert that got less than its share rises by `rate` and that of
one that got more falls by it. The bias only enters the choice, not the weights, so it has no
gradient.

Letters: B documents of a batch, S tokens of a document, E experts. Source: Wang et al. 2024,
"Auxiliary-Loss-Free Load Balancing", algorithm 1.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from tokenizers import Tokenizer
from torch import nn
from torch.nn import functional

from mtp_research.data.packing import EncodedDocument
from mtp_research.data.sources import Document
from mtp_research.data.tokenizer import (
    ASSISTANT_ID,
    BOS_ID,
    PAD_ID,
    encode_document,
    encode_documents,
    prompt_ids,
)
from mtp_research.models.fresh import TargetModel, generate_greedy, next_token_logits
from mtp_research.pretrain.pretrain_data import PretrainData

MAX_DEV_DOCUMENTS = 192
DEV_BATCH_SIZE = 16
SAMPLE_TOKENS = 96
SAMPLE_PROMPTS: dict[str, tuple[str, str]] = {
    "math": (
        "chat",
        "Mia has 6 boxes with 12 pencils in each box. She gives 20 pencils to her brother. "
        "How many pencils does Mia have left?",
    ),
    "arith": ("chat", "What is 48 + 37?"),
    "python": ("completion", "def count_words(text):\n    "),
    "howto": ("chat", "How do I use `cp` on the command line?"),
    "dialog": ("chat", "Hi, can I get a large latte with oat milk?"),
    "prose": ("completion", "It was a cold evening, and the old man"),
}

RouterHook = Callable[
    [nn.Module, tuple[torch.Tensor, ...], tuple[torch.Tensor, torch.Tensor, torch.Tensor]], None
]


def evaluate_target(
    model: TargetModel, data: PretrainData, *, seq_len: int, report: Callable[[str], None]
) -> dict[str, object]:
    """`dev_losses` as `dev` and `sample_texts` as `samples`; `report` takes a line for each."""
    tokenizer = data.tokenizer
    losses = dev_losses(model, data.dev_documents, tokenizer=tokenizer, seq_len=seq_len)
    for domain, entry in losses.items():
        report(f"dev {domain:14s} loss {entry['loss']:.3f} bits/byte {entry['bits_per_byte']:.3f}")
    samples = sample_texts(model, tokenizer=tokenizer, max_new_tokens=SAMPLE_TOKENS)
    for domain, text in samples.items():
        report(f"--- sample {domain}\n{text}")
    return {"dev": losses, "samples": samples}


@torch.inference_mode()
def dev_losses(
    model: TargetModel,
    documents: Mapping[str, Sequence[Document]],
    *,
    tokenizer: Tokenizer,
    seq_len: int,
) -> dict[str, dict[str, float]]:
    """Loss of up to 192 held-out documents per domain, each alone in its row of `seq_len` tokens.

    Returns:
        Per domain and for `all`: `loss` (nats per token), `bits_per_byte` of the text that was
        scored (special tokens cost bits and have no bytes), `num_tokens`, `num_bytes`.
    """
    result: dict[str, dict[str, float]] = {}
    for domain, members in documents.items():
        encoded = list(encode_documents(list(members)[:MAX_DEV_DOCUMENTS], tokenizer))
        nats = 0.0
        for first in range(0, len(encoded), DEV_BATCH_SIZE):
            nats += _batch_nats(model, encoded[first : first + DEV_BATCH_SIZE], seq_len=seq_len)
        heads = [list(document.token_ids[:seq_len]) for document in encoded]
        num_bytes = sum(len(text.encode()) for text in tokenizer.decode_batch(heads))
        result[domain] = _loss_entry(nats, sum(len(ids) - 1 for ids in heads), num_bytes)
    entries = list(result.values())
    result["all"] = _loss_entry(
        sum(entry["loss"] * entry["num_tokens"] for entry in entries),
        int(sum(entry["num_tokens"] for entry in entries)),
        int(sum(entry["num_bytes"] for entry in entries)),
    )
    return result


def _batch_nats(model: TargetModel, documents: Sequence[EncodedDocument], *, seq_len: int) -> float:
    rows = [torch.tensor(document.token_ids[:seq_len]) for document in documents]
    token_ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD_ID)
    token_ids = token_ids.to(model.device)  # [B, S]
    # Padding is on the right, so that causal attention never sees it.
    logits = next_token_logits(model, token_ids[:, :-1])
    return functional.cross_entropy(
        logits.float().flatten(0, 1),
        token_ids[:, 1:].flatten(),
        ignore_index=PAD_ID,
        reduction="sum",
    ).item()


def _loss_entry(nats: float, num_tokens: int, num_bytes: int) -> dict[str, float]:
    return {
        "loss": nats / max(num_tokens, 1),
        "bits_per_byte": nats / math.log(2.0) / max(num_bytes, 1),
        "num_tokens": num_tokens,
        "num_bytes": num_bytes,
    }


@torch.inference_mode()
def sample_texts(
    model: TargetModel, *, tokenizer: Tokenizer, max_new_tokens: int
) -> dict[str, str]:
    """Greedy continuation of one prompt per kind of text."""
    samples: dict[str, str] = {}
    for domain, (form, prompt) in SAMPLE_PROMPTS.items():
        if form == "chat":
            ids = prompt_ids([("user", prompt)], tokenizer)
            assert ids[-1] == ASSISTANT_ID, "a chat prompt must hand over to the assistant"
        else:
            document = Document(doc_id=domain, domain=domain, text=prompt.rstrip())
            ids = list(encode_document(document, tokenizer).token_ids[:-1])
            assert ids[0] == BOS_ID, "a document starts with bos"
        new_ids = generate_greedy(model, ids, max_new_tokens=max_new_tokens)
        samples[domain] = tokenizer.decode(new_ids)
    return samples


class ExpertBalancer:
    """Counts how many tokens each expert gets and moves the routers' biases.

    Must be made before the model is compiled: the counters are forward hooks, which become part of
    the compiled graph.

    Args:
        routers: modules with a buffer `e_score_correction_bias` [E] whose forward returns
            (logits, weights, indices), all with the same E; none for a dense model.
        rate: step of the bias per update, in units of a sigmoid score, >= 0.
    """

    def __init__(self, routers: Sequence[nn.Module], *, rate: float) -> None:
        self.routers = list(routers)
        self.rate = rate
        # per router [E] fp32, tokens seen by each expert since the last `update`
        self.loads = [torch.zeros_like(_bias(router)) for router in self.routers]
        self._hooks = [
            router.register_forward_hook(_count_into(load))
            for router, load in zip(self.routers, self.loads, strict=True)
        ]

    @torch.no_grad()
    def update(self, *, scale: float = 1.0) -> torch.Tensor | None:
        """Move every bias by one step and clear the counters, in place, without a sync.

        A `scale` of the rate that follows the learning rate lets the biases come to rest with it.
        Gives the 0-dim fp32 imbalance, largest load / mean load of the worst router (1 is perfect),
        on the device; None without routers.
        """
        if not self.routers:
            return None
        loads = torch.stack(self.loads)  # [routers, E]
        mean = loads.mean(dim=1, keepdim=True)
        steps = (mean - loads).sign()
        biases = [_bias(router) for router in self.routers]
        torch._foreach_add_(biases, list(steps.unbind()), alpha=self.rate * scale)
        torch._foreach_zero_(self.loads)
        return (loads.amax(dim=1) / mean.squeeze(1).clamp(min=1.0)).amax()

    def close(self) -> None:
        """Stop counting."""
        for hook in self._hooks:
            hook.remove()


def _bias(router: nn.Module) -> torch.Tensor:
    return router.get_buffer("e_score_correction_bias")


def _count_into(load: torch.Tensor) -> RouterHook:
    num_experts = load.shape[0]

    def count(
        module: nn.Module,
        inputs: tuple[torch.Tensor, ...],
        output: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    ) -> None:
        if module.training:
            experts = torch.arange(num_experts, device=load.device)
            chosen = output[2].detach().reshape(-1, 1)  # [tokens * top_k, 1]
            load.add_((chosen == experts).sum(dim=0))

    return count
