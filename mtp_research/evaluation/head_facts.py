"""What a results file says about the heads it was decoded with, so that a report needs no folder.

Letter: N MTP modules.
"""

from pathlib import Path

from mtp_research.files import sha256_of
from mtp_research.heads.draft_vocabulary import RANKING_FILE
from mtp_research.heads.record import RECORD_FILE, read_head_record

_SPEC_FACTS = ("unroll", "num_mtp_modules", "hidden_source", "recycle_norm")


def head_facts(head: str | None) -> dict[str, object] | None:
    """Name, spec and hash of trained heads; None where there are none to describe.

    Args:
        head: `spec.head`: a folder of trained heads, `oracle`, a native checkpoint, or None.

    Returns:
        `name`, `unroll`, `num_mtp_modules` (N), `hidden_source`, `recycle_norm`, and the sha256 of
        the weights. Only the name for native heads, which carry no record.
    """
    if head is None or head == "oracle":
        return None
    folder = Path(head)
    if not (folder / RECORD_FILE).is_file():
        return {"name": folder.name}
    spec = read_head_record(folder)["spec"]
    weights = folder / "model.safetensors"
    digest = sha256_of(weights) if weights.is_file() else None
    facts: dict[str, object] = {"name": folder.name, "sha256": digest}
    return facts | {name: spec.get(name) for name in _SPEC_FACTS}


def ranking_sha256(head: str | None) -> str | None:
    """sha256 of the token ranking that a reduced draft vocabulary is cut from; None without one.

    Args:
        head: as for `head_facts`.
    """
    path = None if head is None else Path(head) / RANKING_FILE
    return sha256_of(path) if path is not None and path.is_file() else None
