"""What another engine loads for heads, and our loop's twin of it.

Between configuration and decode loop. Heads of our own are exported into the output folder in the
published names of their family; modules that came with the target are there already. The twin is
read back from what was exported, whose numbers are rounded to bfloat16 as the engine's are, and is
run by the engine's conventions: where the two differ in equal texts, an engine has a fault.
"""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from mtp_research.config.schema import OWN
from mtp_research.decode.build import Heads
from mtp_research.evaluation.backends.protocol import HeadsKey
from mtp_research.evaluation.backends.transformers_backend import layer_pattern
from mtp_research.evaluation.run.conditions import Condition
from mtp_research.heads.engines import ENGINES, Engine, engine_for, run_as
from mtp_research.heads.export import LM_HEAD, stitch_heads
from mtp_research.heads.native import read_index
from mtp_research.heads.stack import MTPHeads
from mtp_research.heads.weights import load_heads
from mtp_research.models.target import Target
from mtp_research.runtime.errors import ConfigError

EXPORT_FOLDER = "exported"


class EngineHeads(NamedTuple):
    """Heads as one engine has them."""

    heads: MTPHeads  # for our loop, by the engine's conventions
    policy: str  # of its loop
    checkpoint: Path  # what it loads


def check_engines(
    conditions: Sequence[Condition], heads: Mapping[HeadsKey, Heads], target: Target
) -> dict[HeadsKey, Engine]:
    """How each engine runs each head that it decodes with, for every K that is asked for.

    Raises:
        ConfigError: an engine refuses it, or what it does with the family was not found out.
    """
    found: dict[HeadsKey, Engine] = {}
    for one in conditions:
        head = one.config.spec.head
        loaded = heads.get((head, None))
        if one.backend != OWN and one.num_speculative_tokens and isinstance(loaded, MTPHeads):
            found[head, one.backend] = _entry(one.backend, loaded, one.num_speculative_tokens)
    drafting = {engine for _, engine in found}
    for engine in {one.backend for one in conditions} - drafting - {OWN}:
        _check_plain(engine, target)
    return found


def export_heads_for(
    entries: Mapping[HeadsKey, Engine], heads: Mapping[HeadsKey, Heads], *, out: Path
) -> dict[HeadsKey, EngineHeads]:
    """Every head as its engines have it; checkpoints are written below `out`, which is replaced."""
    if entries:  # what an earlier process began
        shutil.rmtree(out, ignore_errors=True)
    made: dict[HeadsKey, EngineHeads] = {}
    for number, ((head, engine), entry) in enumerate(entries.items()):
        loaded = heads[head, None]
        assert isinstance(loaded, MTPHeads), f"check_engines lets no {loaded} through"
        assert engine is not None, "an entry is one engine's"
        folder = out / f"{engine}-{number}"
        made[head, engine] = _export(engine, loaded, head=str(head), entry=entry, out=folder)
    return made


def _entry(engine: str, heads: MTPHeads, num_drafts: int) -> Engine:
    entry = engine_for(engine, heads, num_drafts=num_drafts)
    if entry is None or entry.run.policy is None:
        raise ConfigError(
            f"backend={engine} must know heads of family {heads.target.family_name} "
            "(mtp_research/heads/engines.py), got no entry; set spec.k=0, or backend=own."
        )
    if engine == "transformers":
        layer_pattern(heads.target, num_modules=heads.spec.num_mtp_modules)
    return entry


def _export(engine: str, heads: MTPHeads, *, head: str, entry: Engine, out: Path) -> EngineHeads:
    policy, source = entry.run.policy, Path(heads.target.path)
    assert policy is not None, "check_engines lets no other through"
    if Path(head).resolve() == source.resolve() and not _lacks_lm_head(source, entry):
        return EngineHeads(run_as(heads, entry.run), policy, source)
    stitch_heads(heads, out, source=source, engine=engine)
    return EngineHeads(run_as(load_heads(out, heads.target), entry.run), policy, out)


def _check_plain(engine: str, target: Target) -> None:
    """Refuse a target that the engine decodes only as an export writes it, with modules."""
    entry = ENGINES[engine].get(target.family_name)
    if entry is not None and _lacks_lm_head(Path(target.path), entry):
        raise ConfigError(
            f"spec.k must be above 0 for backend={engine} with this target, which ties lm_head to "
            "its embedding: only an export with heads writes it out; set spec.k=1."
        )


def _lacks_lm_head(source: Path, entry: Engine) -> bool:
    """Whether the engine would leave lm_head as it was allocated."""
    return not entry.knows_ties and LM_HEAD not in read_index(source).files
