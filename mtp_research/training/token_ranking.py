"""Rank a vocabulary by its use in training answers, for `spec.draft_vocabulary_size`.

    python -m mtp_research.training.token_ranking --head assets/lab_tiny/heads/chain_n3 \
        --target assets/lab_tiny/target --data assets/lab_tiny/regenerated.jsonl.xz

Counts the answer tokens of the documents that heads train on (held-out documents are left out) and
writes `token_ranking.json` into the head folder. Letter: V vocabulary.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from mtp_research.config.training_schema import DataConfig
from mtp_research.data.packing import EncodedDocument
from mtp_research.heads.draft_vocabulary import RANKING_FILE, write_ranking
from mtp_research.models.target import load_target
from mtp_research.runtime.errors import ConfigError, IntegrityError
from mtp_research.runtime.options import OptionParser
from mtp_research.runtime.provenance import write_error
from mtp_research.training.documents import load_head_documents, read_head_documents

_SIZES = (256, 1024, 4096, 16384, 32768)


def count_answer_tokens(documents: Sequence[EncodedDocument], *, vocab_size: int) -> Tensor:
    """How often each token is an answer's, `[V]` int64."""
    answers = [
        token
        for document in documents
        for token, is_answer in zip(document.token_ids, document.loss_mask, strict=True)
        if is_answer
    ]
    return torch.bincount(torch.tensor(answers, dtype=torch.int64), minlength=vocab_size)


def main(argv: Sequence[str] | None = None) -> int:
    """Count, write and print what share of the answers each size covers."""
    parser = OptionParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--head", type=Path, required=True, help="folder of the heads")
    parser.add_argument("--target", required=True, help="folder or hub id of the target")
    parser.add_argument("--data", required=True, help="documents that the heads learn from")
    parser.add_argument("--eval-documents", type=int, default=DataConfig.eval_documents)
    args = parser.parse_args(argv)
    try:
        target = load_target(args.target, device="cpu")
        data = DataConfig(args.data, eval_documents=args.eval_documents)
        vocab_size = target.config.vocab_size
        documents = load_head_documents(
            data,
            read_head_documents(data),
            model_path=args.target,
            vocab_size=vocab_size,
            num_depths=1,
        )
        counts = count_answer_tokens(documents.train, vocab_size=vocab_size)
        write_ranking(args.head, counts, target=target, source=Path(args.data).name)
    except (ConfigError, IntegrityError) as fault:
        write_error(str(fault))
        return fault.exit_code
    covered = counts.sort(descending=True).values.cumsum(0) / max(int(counts.sum()), 1)
    for size in (size for size in _SIZES if size <= vocab_size):
        sys.stdout.write(f"{size:6d} tokens cover {covered[size - 1]:.4f} of the answers\n")
    sys.stdout.write(f"wrote {args.head / RANKING_FILE}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
