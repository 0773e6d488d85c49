"""Write docs/families.md: the family table, and by which tests each family is covered.

    python tools/family_table.py            print
    python tools/family_table.py --write    write docs/families.md

Names and conventions come from `mtp_research/models/families.py`, coverage from what the tests run,
so that neither can be claimed by hand; tests/test_family_table.py keeps the file current.
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from mtp_research.models.families import FAMILIES
from mtp_research.models.family import Family
from tests.decode.test_exactness import ALL_TESTED, FAMILIES_TESTED
from tests.decode.test_recurrent import RECIPES_RECOMPUTED
from tests.heads.release import RELEASES
from tests.heads.test_library_drafts import LIBRARY_FAMILIES
from tests.recipes import RECIPES, RECURRENT_RECIPES

PATH = ROOT / "docs" / "families.md"
OPENING = """# Model families

Written by `python tools/family_table.py --write` from `mtp_research/models/families.py` and the
tests; do not edit. All checks run on tiny random models (CPU): no released weights were loaded.

Conventions: what the first module reads and what the next pass gets (before or after a final norm),
order of the projection's input, and where a release keeps its modules (`mtp.*` is also the neutral
layout for heads of families that ship none).

| family | model types | attention | reads / recycles | input order | published names | checked by |
|---|---|---|---|---|---|---|
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
- **library**: our `training` drafts are those of transformers' `generate(use_mtp=True)`, one and
  three modules (`tests/heads/test_library_drafts.py`)

Sparse attention (a learned index over keys) is run densely: exact up to `index_topk` tokens,
refused beyond. Not supported: families whose text model has no causal-LM class in transformers
(Step-3.5), hyper-connections (DeepSeek-V4, hy_v4, Qwen4), and DSpark stages (DeepSeek-V4.1).
"""


def family_table() -> str:
    """The whole file."""
    rows = [_row(name, family) for name, family in sorted(FAMILIES.items())]
    return OPENING + "\n".join(rows) + "\n" + CHECKS


def _row(name: str, family: Family) -> str:
    cells = (
        name,
        ", ".join(family.model_types),
        _attention(family),
        f"{family.hidden_source} / {family.recycle_norm}",
        family.concat_order.replace("_", " "),
        f"`{family.native.prefix}*`",
        ", ".join(_checks(name)) or "nothing",
    )
    return f"| {' | '.join(cells)} |"


def _attention(family: Family) -> str:
    kinds = ["latent pages" if family.latent_attention else "per head"]
    if family.sparse_attention:
        kinds.append("index run densely")
    if family.mixer is not None:
        kinds.append("recurrent layers")
    return ", ".join(kinds)


def _checks(name: str) -> list[str]:
    covered = {
        "paged": RECIPES | RECURRENT_RECIPES,
        "exact": {*ALL_TESTED, *FAMILIES_TESTED, *RECIPES_RECOMPUTED},
        "names": RELEASES,
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
