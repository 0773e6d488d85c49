"""Writing heads: a folder that `load_heads` reads, with a model card, on disk or on the hub.

The folder is `head.json` (spec, target and provenance, see `record`), `model.safetensors` and,
where people are to read it, `README.md`: the card, whose facts are all taken from `head.json`.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from torch import Tensor

from mtp_research.heads.record import (
    HEAD_FORMAT,
    HOLDS_FP8,
    RECORD_FILE,
    WEIGHTS_HASH,
    conventions_phrase,
    read_head_record,
)
from mtp_research.models.target import Target, target_hashes
from mtp_research.runtime.errors import ConfigError, EnvironmentFault
from mtp_research.runtime.files import sha256_of, write_atomically, write_tensors
from mtp_research.runtime.provenance import PROJECT, project_version, redact_tree

WEIGHTS_FILE = "model.safetensors"
CARD_FILE = "README.md"
RANKING_FILE = "token_ranking.json"  # of `draft_vocabulary`; goes where the heads go


def target_facts(target: Target) -> dict[str, object]:
    """What a head must share with its target, as `head.json` holds it."""
    return {
        "family": target.family_name,
        "hidden_size": target.config.hidden_size,
        "vocab_size": target.config.vocab_size,
        **target_hashes(target),
    }


def write_head_files(
    folder: Path,
    tensors: Mapping[str, Tensor],
    *,
    spec: Mapping[str, object],
    target: Target,
    provenance: Mapping[str, object],
    dtype: torch.dtype | None = None,
) -> None:
    """Write weights and record (the folder is created if missing; each file is replaced at once).

    Floating tensors are written in `dtype`, None for their own. `provenance` are facts that JSON
    can hold.
    """
    folder.mkdir(parents=True, exist_ok=True)
    whole = {
        name: tensor.to("cpu", dtype if tensor.is_floating_point() else None).contiguous()
        for name, tensor in tensors.items()
    }
    unfinished = folder / f".{WEIGHTS_FILE}.tmp"
    write_tensors(whole, unfinished)
    unfinished.replace(folder / WEIGHTS_FILE)
    record = {
        "format": HEAD_FORMAT,
        "conventions": conventions_phrase(spec),  # for readers; loading goes by `spec`
        "spec": spec,
        "target": target_facts(target) | ({HOLDS_FP8: True} if target.holds_fp8 else {}),
        WEIGHTS_HASH: sha256_of(folder / WEIGHTS_FILE),
        "provenance": redact_tree(dict(provenance)),
    }
    write_atomically(folder / RECORD_FILE, json.dumps(record, indent=2) + "\n")


def add_card(folder: Path, *, ranking_of: str = "") -> None:
    """Write the card of a head folder, and copy the token ranking of the folder `ranking_of`."""
    write_atomically(folder / CARD_FILE, model_card(read_head_record(folder)))
    ranking = Path(ranking_of) / RANKING_FILE
    if ranking_of and ranking.is_file() and ranking.parent.resolve() != folder.resolve():
        shutil.copyfile(ranking, folder / RANKING_FILE)


def model_card(record: Mapping[str, Mapping[str, object]]) -> str:
    """README of a head folder in Markdown, of the facts of its `head.json` alone."""
    spec, target = record["spec"], record["target"]
    provenance = record.get("provenance") or {}
    hub_id = str(provenance.get("hub_id") or "").partition("@")[0]
    count = spec["num_mtp_modules"]
    front = ["library_name: mtp-research", "tags: [speculative-decoding, multi-token-prediction]"]
    front += [f"base_model: {hub_id}"] if hub_id else []
    rows = {
        "target": f"`{hub_id}`" if hub_id else f"a model of family {target['family']}",
        "hub commit": provenance.get("hub_commit"),
        "family": target["family"],
        "hidden size, vocabulary": f"{target['hidden_size']}, {target['vocab_size']}",
        "modules (N)": count,
        "unroll": spec.get("unroll"),
        "conventions": conventions_phrase(spec),
        "order of modules": spec.get("module_schedule"),
        "started from": provenance.get("started_from"),
        "acceptance length on held-out text": _walk_length(provenance),
        "training step": provenance.get("step", provenance.get("num_steps")),
        "kind of training text": provenance.get("data_kind"),
        "sha256 of the training text": provenance.get("data_sha256"),
        "trained on": provenance.get("trained_on"),
        "sha256 of the weights": record.get(WEIGHTS_HASH),
        "written by": f"{PROJECT} {project_version()}",
    }
    table = [f"| {name} | {value} |" for name, value in rows.items() if value is not None]
    code = f'''```python
from mtp_research import SpecDecoder, load_heads, load_target

target = load_target("{hub_id or "PATH OF THE TARGET"}")
heads = load_heads("THIS FOLDER OR REPOSITORY", target)
for output in SpecDecoder(target, heads).generate(["Once upon a time"]):
    print(output.text)
```'''
    parts = [
        "---\n" + "\n".join(front) + "\n---",
        f"# MTP heads: {count} module{'s' * (count != 1)}",
        "Multi-token-prediction heads for speculative decoding. The target's weights are not in "
        "here; the heads run on that target alone, and the text stays the target's own.",
        "| fact | value |\n|---|---|\n" + "\n".join(table),
        code,
    ]
    return "\n\n".join(parts) + "\n"


def push_folder(folder: Path, repo_id: str, *, private: bool | None, revision: str | None) -> str:
    """Upload a head folder to the hub, whose repository is made if it is missing; its address.

    Raises:
        EnvironmentFault: the hub refuses, or cannot be reached.
    """
    api = HfApi()
    try:
        url = str(api.create_repo(repo_id, private=private, exist_ok=True))
        if revision is not None:
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        message = f"MTP heads, by {PROJECT} {project_version()}"
        api.upload_folder(
            repo_id=repo_id, folder_path=folder, revision=revision, commit_message=message
        )
    except HFValidationError as fault:
        raise ConfigError(
            f"repo_id must be NAME or ORGANISATION/NAME, got {repo_id!r}: {fault}"
        ) from fault
    except (HfHubHTTPError, OSError) as fault:
        reason = next(iter(str(fault).splitlines()), type(fault).__name__)
        raise EnvironmentFault(
            f"push_to_hub needs a hub that takes {repo_id!r}, got: {reason}; log in with "
            "`hf auth login`, or use save_pretrained(FOLDER)."
        ) from fault
    return url


def _walk_length(provenance: Mapping[str, object]) -> str | None:
    """Acceptance length of the replay walk, where the trainer recorded one."""
    walk = provenance.get("held_out_walk", provenance.get("held_out"))  # its name in old files
    length = walk.get("acceptance_length") if isinstance(walk, Mapping) else None
    return f"{length:.3f} (replay walk, greedy)" if isinstance(length, float) else None
