"""Write the family table: which tests cover each family, in docs/families.md.

    python tools/family_table.py            print docs/families.md
    python tools/family_table.py --write    write it

Names and conventions come from `mtp_research/models/families.py`, coverage from what the tests run,
so that neither can be claimed by hand; tests/test_family_table.py keeps the file current.
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from mtp_research.runtime.threads import wait_passively

wait_passively()

from mtp_research.config.schema import VERSIONS
from mtp_research.heads.engines import ENGINES, Engine
from mtp_research.models.families import FAMILIES, REFUSED, REFUSED_FIELDS
from mtp_research.models.family import Family
from tests.decode.test_exactness import ALL_TESTED, FAMILIES_TESTED
from tests.decode.test_recurrent import RECIPES_RECOMPUTED
from tests.heads.release import RELEASES
from tests.heads.test_library_drafts import LIBRARY_FAMILIES
from tests.heads.test_references import FAMILIES_REFERENCED
from tests.recipes import RECIPES, RECURRENT_RECIPES

PATH = ROOT / "docs" / "families.md"
OPENING = """# Model families

Written by `python tools/family_table.py --write` from `mtp_research/models/families.py` and the
tests; do not edit. All checks run on tiny random models (CPU), none on released weights.

Conventions: what the first module reads and what the next pass gets (before or after a final norm),
order of the projection's input, whose output head the modules use, and where a release keeps its
modules (`mtp.*` is also the neutral layout for heads of families that ship none).

| family | model types | attention | reads / recycles | input order | head | tensors | checked by |
|---|---|---|---|---|---|---|---|
"""
CHECKS = """
Checks:

- **paged**: packed passes over shuffled pages with a rollback give the logits of the library's own
  attention (`tests/models/test_paged.py`, float32; recurrent: `tests/models/test_recurrent.py`)
- **exact**: draft logits of `training` and `eagle` equal a from-scratch recompute for any history
  (`tests/decode/test_exactness.py`, `tests/decode/test_recurrent.py`, float64, below 1e-10)
- **names**: a checkpoint in release names loads, matches a reference of the module's wrapper,
  drafts without changing the greedy text, and is written back byte for byte
  (`tests/heads/test_native.py`)
- **reference**: every loaded module gives the numbers of a float64 reference that was written from
  formulas and published code on the released tensors, attention, rotary embedding, routing and head
  included (`tests/heads/test_references.py`, float32, below 1e-6 of the largest magnitude)
- **library**: our `training` drafts are those of transformers' `generate(use_mtp=True)`, one and
  three modules (`tests/heads/test_library_drafts.py`)

Sparse attention (a learned index over keys) is run densely: exact up to `index_topk` tokens,
refused beyond. So are `dynamic` and `longrope` rotary scaling beyond their short texts
([long texts](recipes.md#7-long-texts)). Step-3.5's text model is the library's (5.17 to 5.23),
which has no causal-LM class for it; `mtp_research/models/families.py` adds the lm_head and the
release's names. Its modules have output heads of their own, which are decoded and exported, not
trained: new heads use the target's lm_head, and their export repeats it in each module. Kimi-K2 and
MiniMax-M2 publish no modules.
"""
DIFFERENCES = {
    "ernie4_5_moe": "vLLM feeds post-norm states, puts no norm before the head and turns halves of "
    "a head instead of neighbours; training code feeds pre-norm states and uses the target's final "
    "norm, as here",
    "exaone_moe": "older vLLM and SGLang give its module layer 0's type; here "
    "`mtp_layer_types` of the config decides, full attention without it",
    "glm4_moe": "vLLM 0.24 to 0.33 recycles before the module's norm: `head=vllm_glm4_moe` in "
    "training, `recycle_norm` of `head.json` in decoding (glm4_moe_lite: the same)",
    "glm_moe_dsa": "with `index_share_for_mtp_iteration` engines reuse the first draft's selection "
    "of keys in later drafts; here every row attends to all keys",
    "mimo": "SGLang and FastMTP feed post-norm states: `head.hidden_source=post_norm`",
    "mimo_v2": "SGLang does not chain: every module reads the target's state at shifted tokens, "
    "`spec.policy=target_roll`, trained by `objective.unroll=independent`; vLLM runs module 0 "
    "only, `spec.module_schedule=first`",
    "step3p5": "transformers feeds post-norm states, vLLM and SGLang pre-norm ones",
}
DIFFERENCES_OPENING = """
Where engines disagree, a released head runs as the table says, and these settings give the other
way (engines as read in their published wheels, none was run here):

"""
ENGINES_OPENING = """
How engines run heads, from `mtp_research/heads/engines.py`: read in the files of the last column,
not run. `?` was not found out, and a family without a row was not read. `ties` says whether a
target that ties lm_head to its embedding works without lm_head.weight. `python -m mtp_research
export --for ENGINE` measures on a head what these differences cost.

| engine | family | policy | reads / recycles | input order | position 0 | modules | ties | source |
|---|---|---|---|---|---|---|---|---|
"""
REFUSED_OPENING = """
Refused by name:

"""


def family_table() -> str:
    """The whole file."""
    rows = [_row(name, family) for name, family in sorted(FAMILIES.items())]
    differences = [f"- **{name}**: {text}\n" for name, text in sorted(DIFFERENCES.items())]
    refused = [f"- `{name}`: {reason}\n" for name, reason in sorted(REFUSED.items())]
    refused += [f"- field `{name}`: {reason}\n" for name, reason in sorted(REFUSED_FIELDS.items())]
    engines = [
        _engine_row(f"{name} {VERSIONS[name]}", family, engine)
        for name, families in sorted(ENGINES.items())
        for family, engine in sorted(families.items())
    ]
    parts = ("\n".join(rows), "\n", CHECKS, DIFFERENCES_OPENING, *differences)
    parts += (ENGINES_OPENING, *engines)
    return OPENING + "".join((*parts, REFUSED_OPENING, *refused))


def _row(name: str, family: Family) -> str:
    cells = (
        name,
        ", ".join(family.model_types),
        _attention(family),
        f"{family.hidden_source} / {family.recycle_norm}",
        family.concat_order.replace("_", " "),
        "own" if family.owns_lm_head else "target's",
        f"`{family.native.prefix}*`",
        ", ".join(checks_of(name)) or "nothing",
    )
    return f"| {' | '.join(cells)} |"


def _engine_row(name: str, family: str, engine: Engine) -> str:
    run, unknown = engine.run, "?"
    zeroed = {True: "zeroed", False: "kept", None: unknown}[run.zero_position_0]
    modules = {"first": "module 0 always", "cycle": "one a draft", None: unknown}
    cells = (
        name,
        family,
        run.policy or unknown,
        f"{run.hidden_source or unknown} / {run.recycle_norm or unknown}",
        (run.concat_order or unknown).replace("_", " "),
        zeroed,
        modules[run.module_schedule],
        {True: "yes", False: "no", None: unknown}[engine.knows_ties],
        engine.source,
    )
    return f"| {' | '.join(cells)} |\n"


def _attention(family: Family) -> str:
    kinds = ["latent pages" if family.latent_attention else "per head"]
    if family.sparse_attention:
        kinds.append("index run densely")
    if family.mixer is not None:
        kinds.append("recurrent layers")
    return ", ".join(kinds)


def checks_of(name: str) -> list[str]:
    """Names of the checks that cover a family."""
    covered = {
        "paged": RECIPES | RECURRENT_RECIPES,
        "exact": {*ALL_TESTED, *FAMILIES_TESTED, *RECIPES_RECOMPUTED},
        "names": RELEASES,
        "reference": FAMILIES_REFERENCED,
        "library": LIBRARY_FAMILIES,
    }
    return [check for check, names in covered.items() if name in names]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true")
    if parser.parse_args().write:
        PATH.write_text(family_table(), encoding="utf8")
    else:
        sys.stdout.write(family_table())
