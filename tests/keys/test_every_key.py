"""Every key of both entries, changed alone: the run differs in what the key promises.

The table follows the schema: a key without a row fails, and so does a row without a key. Most runs
are two training steps or three decoded prompts in this process. A row with a `reason` sees less of
its key than a machine with a GPU, ranks or a network would show: what reaches the place where the
key is read, or the line with which it is refused here.
"""

import random

import pytest

from mtp_research.config.ranges import schema_keys
from mtp_research.config.schema import EvalConfig, TrainConfig
from mtp_research.config.training_schema import PretrainConfig
from tests.keys.eval_rows import EVAL_ROWS, UNREAD
from tests.keys.lab import Lab
from tests.keys.row import Row
from tests.keys.train_rows import TRAIN_ROWS

ROWS = [*TRAIN_ROWS, *EVAL_ROWS]
CLEAN = ("ConfigError: ", "EnvironmentFault: ", "IntegrityError: ", "NumericFault: ")


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab(tmp_path_factory.mktemp("keys"))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_key_changed_alone_changes_what_it_promises(row: Row, lab: Lab) -> None:
    before = lab.parts(row.run, row.base)
    after = lab.parts(row.run, {**row.base, row.key: row.value})
    changed, kept = row.changes.split(), row.keeps.split()
    faults = [part["fault"] for part in (before, after) if "fault" not in changed and part["fault"]]
    same = [name for name in changed if before.get(name) == after.get(name)]
    other = [name for name in kept if before.get(name) != after.get(name)]
    found = f"refused: {faults}, equal: {same}, not equal: {other}"
    assert found == "refused: [], equal: [], not equal: []"
    assert row.shows is None or row.shows(before, after)


@pytest.mark.every_case
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("run", ["evaluate", "price", "heads", "target", "matrix"])
def test_keys_changed_together_run_or_are_refused_in_a_line(run: str, seed: int, lab: Lab) -> None:
    draw, rows = random.Random(seed), [row for row in ROWS if row.run == run]
    for _ in range(100):
        chosen = draw.sample(rows, draw.choice((2, 3, 4)))
        bases = {key: value for row in chosen for key, value in row.base.items()}
        changes = bases | {row.key: row.value for row in chosen}
        fault = lab.parts(run, changes)["fault"]
        starts_workers = str(fault).endswith(" processes")  # where the watch ends a run
        assert fault is None or starts_workers or fault.startswith(CLEAN), (changes, fault)


@pytest.mark.parametrize(
    ("schema", "rows"), [(TrainConfig, TRAIN_ROWS), (EvalConfig, EVAL_ROWS)], ids=["train", "eval"]
)
def test_every_key_of_the_schema_has_a_row(schema: type, rows: list[Row]) -> None:
    keys, named = set(schema_keys(schema)), {row.key for row in rows}
    unread = {key for key in keys if schema is EvalConfig and key.startswith(UNREAD)}
    assert keys - named == unread
    assert named - keys == set()


def test_keys_that_eval_does_not_read_change_nothing(lab: Lab) -> None:
    changes = {"model.architecture": {}, "model.pretrain": PretrainConfig(vocab_size=300)}
    before, after = lab.parts("evaluate", {}), lab.parts("evaluate", changes)
    assert [name for name in before if before[name] != after[name]] == ["config"]


@pytest.mark.parametrize("run", ["heads", "matrix", "evaluate", "price"])
def test_no_file_of_a_run_holds_a_secret(
    run: str, lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("PGPASSWORD", "GITHUB_PAT", "DB_PASS")
    secrets = ["hf_" + "A" * 24, *(f"swordfish-{name.lower()}" for name in names)]
    for name, secret in zip(names, secrets[1:], strict=True):
        monkeypatch.setenv(name, secret)
    password = "-".join(("open", "sesame"))  # this very text is in the diff of a run
    project = f"https://user:{password}@host/x"
    found = lab.parts(run, {"logger.tags": secrets, "logger.project": project})
    assert found["fault"] is None
    folder = max(lab.root.glob("run*"), key=lambda path: path.stat().st_mtime_ns)
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert {path.suffix for path in files} >= {".json"}
    for path in files:
        content = path.read_bytes()
        held = [one for one in (*secrets, password) if one.encode() in content]
        assert not held, f"{path} holds {held}"
