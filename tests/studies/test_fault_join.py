"""Price studies of parts of the heads, joined: the study of one process, or a refusal."""

import dataclasses
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from mtp_research.app.cli import compose_config
from mtp_research.config.schema import EvalConfig
from mtp_research.evaluation.fault_join import Part, join_parts
from mtp_research.evaluation.fault_table import (
    main,
    markdown_tables,
    price_rows,
    read_checked_study,
    write_study,
)
from mtp_research.evaluation.stats.fault_study import (
    STUDY_FILE,
    FaultCondition,
    FaultStudy,
    read_study,
)
from mtp_research.evaluation.stats.outcome import PromptEntry
from mtp_research.evaluation.study_sections import fault_section
from mtp_research.report import main as report_main
from mtp_research.runtime.errors import ConfigError, IntegrityError
from mtp_research.studies.fault_price import price_faults

POLICIES = ("training", "training_norefresh")
GIT = {"sha": "c0ffee", "dirty": False, "diff_sha256": "00"}
HARDWARE = {"cpu": "some", "num_cores": 16, "gpus": ["H200"], "memory_bytes": 1}
RUN = {
    "schema": 1,
    "working_dir": "/work",
    "git": GIT,
    "versions": {"torch": "2.11.0"},
    "hardware": HARDWARE,
    "target": {"weights_sha256": "aa"},
}


def part(
    *paths: str, drafts: Sequence[int] = (3,), named: Sequence[str] = ("head",), seed: int = 0
) -> FaultStudy:
    """A study of heads in `paths` over 20 prompts with random counters."""
    rng = random.Random(f"{paths}{seed}")
    conditions = tuple(
        FaultCondition(
            head=name,
            num_mtp_modules=3,
            num_speculative_tokens=num_drafts,
            policy=policy,
            reference=None if policy == POLICIES[0] else POLICIES[0],
            audit={"WRONG": rng.randint(0, 90), "MIXED": 0, "HOLE": 0, "slots": 900},
            accepted_per_round=tuple(
                tuple(rng.choices(range(num_drafts + 1), k=rng.randint(1, 9))) for _ in range(20)
            ),
            text_sha256=tuple(f"text{i}" for i in range(20)),
        )
        for name in named
        for num_drafts in drafts
        for policy in POLICIES
    )
    argv = ["eval.py", "model.path=/t", f"spec.head=[{','.join(paths)}]"]
    return FaultStudy(
        heads=tuple({"name": name, "sha256": p[-6:]} for name, p in zip(named, paths, strict=True)),
        prompts=tuple(PromptEntry(f"q{i}", "math", "chat", f"{i}") for i in range(20)),
        conditions=conditions,
        dtype="float32",
        max_new_tokens=16,
        seed=0,
        run=RUN
        | {"argv": argv, "command": f"python {' '.join(argv)}", "seconds": 12.5}
        | {"started_at": f"2026-11-22T10:0{seed}:00+00:00", "num_conditions": len(conditions)},
    )


def joined(*studies: FaultStudy) -> FaultStudy:
    parts = [Part(Path(f"part{i}"), study) for i, study in enumerate(studies)]
    return join_parts(parts, argv=["part0", "part1", "--out", "whole"])


def without_run(study: FaultStudy) -> FaultStudy:
    return dataclasses.replace(study, run={})


def test_join_of_real_studies_is_the_study_of_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    heads = {name: tmp_path / name / "head" for name in ("chain_n1", "ttt_n1")}
    for name, head in heads.items():  # the trainer calls every head's folder `head`
        head.parent.mkdir()
        head.symlink_to(Path("assets/lab_tiny/heads", name).resolve())
    words = ["experiment=fault_price", "spec.policy=training_norefresh", "spec.k=2"]
    words += ["sampling.max_new_tokens=4", "prompts.max_prompts=1"]
    asked = {name: f"spec.head=[{head}]" for name, head in heads.items()}
    asked["whole"] = f"spec.head=[{','.join(map(str, heads.values()))}]"
    for name, word in asked.items():
        monkeypatch.setattr(sys, "argv", ["eval.py", *words, word])
        price_faults(compose_config(EvalConfig, [*words, word]), tmp_path / "out" / name)
    folders = [tmp_path / "out" / name for name in heads]
    assert {head["name"] for one in folders for head in read_study(one).heads} == {"head"}
    assert main([*map(str, folders), "--out", str(tmp_path / "joined")]) == 0
    made, whole = (read_checked_study(tmp_path / name) for name in ("joined", "out/whole"))
    assert without_run(made) == without_run(whole)
    assert made.num_asked == whole.num_asked == 4
    table = capsys.readouterr().out.rpartition("policy |")[2]
    assert markdown_tables(whole).endswith(table.rstrip("\n"))
    for record, folder in zip(made.parts, folders, strict=True):
        own = read_study(folder).run
        assert all(record[key] == own[key] for key in ("command", "started_at", "seconds"))
        assert 0 < float(str(own["seconds"])) < 60
    assert made.run["target"] == whole.run["target"]
    again = compose_config(EvalConfig, [*words, asked["whole"]])
    with pytest.raises(IntegrityError, match="was joined from parts; finish those"):
        price_faults(again, tmp_path / "joined")


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_join_keeps_every_figure_of_every_part_in_any_order(order: tuple[int, ...]) -> None:
    parts = [part(f"/m/chain_n{i}_s0/head", drafts=(3, 5), seed=i) for i in range(3)]
    made = joined(*(parts[i] for i in order))
    names = [f"chain_n{i}_s0/head" for i in order]
    assert [head["name"] for head in made.heads] == names
    assert list(dict.fromkeys(one.head for one in made.conditions)) == names
    figures = [row[1:] for i in order for row in map(dataclasses.astuple, price_rows(parts[i]))]
    assert [row[1:] for row in map(dataclasses.astuple, price_rows(made))] == figures
    assert (made.num_asked, made.num_other_texts) == (12, 0)
    assert made.run["started_at"] == "2026-11-22T10:00:00+00:00"
    assert "fault_table part0 part1 --out whole" in str(made.run["command"])


def test_joins_of_joins_are_one_join() -> None:
    a, b, c = (part(f"/m/{name}/head") for name in "abc")
    made, flat = joined(joined(a, b), c), joined(a, b, c)
    assert without_run(made) == without_run(flat)
    assert made.run == flat.run


def test_parts_of_one_head_by_k_are_one_head_and_lone_names_stay_short() -> None:
    made = joined(part("m/a/head", drafts=(3,)), part("/work/m/a/head", drafts=(5,)))
    assert [head["name"] for head in made.heads] == ["head"] == [made.conditions[0].head]
    assert {one.num_speculative_tokens for one in made.conditions} == {3, 5}
    short = joined(part("/m/a", named=("a",)), part("/m/b", named=("b",)))
    assert [head["name"] for head in short.heads] == ["a", "b"]


def test_texts_are_held_against_the_first_condition_of_all_parts() -> None:
    a, b = part("/m/a/head"), part("/m/b/head")
    texts = ("other", *b.conditions[0].text_sha256[1:])
    b = dataclasses.replace(
        b, conditions=tuple(dataclasses.replace(one, text_sha256=texts) for one in b.conditions)
    )
    assert b.num_other_texts == 0  # agree among themselves
    assert joined(a, b).num_other_texts == joined(b, a).num_other_texts == 2


def test_unfinished_part_leaves_the_study_unfinished(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    b = part("/m/b/head", drafts=(3, 5))
    folders = [str(tmp_path / name) for name in "ab"]
    write_study(tmp_path / "a", part("/m/a/head"))
    write_study(tmp_path / "b", dataclasses.replace(b, conditions=b.conditions[:3]))
    out = tmp_path / "whole"
    assert main([*folders, "--out", str(out)]) == 0
    wanted = "warning: unfinished: 5 of 6 conditions were decoded, the others are in no table"
    shown = capsys.readouterr().out
    assert shown.splitlines()[0] == wanted
    assert main([str(out)]) == 0
    assert capsys.readouterr().out == shown
    write_study(tmp_path / "b", b)
    assert main([*folders, "--out", str(out)]) == 0  # what was joined is joined again
    assert "unfinished" not in capsys.readouterr().out


def test_page_of_a_joined_study_names_its_parts(tmp_path: Path) -> None:
    write_study(tmp_path, joined(part("/m/a/head"), part("/m/b/head", seed=1)))
    assert report_main([str(tmp_path)]) == 0
    page = (tmp_path / "report" / "report.html").read_text()
    assert "a/head K=3" in page
    assert "b/head K=3" in page
    facts = fault_section(tmp_path, name="f").facts
    assert facts["joined from"] == "; ".join(
        f"python eval.py model.path=/t spec.head=[/m/{name}/head] "
        f"(2026-11-22T10:0{i}:00+00:00, 12.5 s)"
        for i, name in enumerate("ab")
    )
    wanted = {"target": "model.path=/t", "heads": "a/head, b/head", "conditions": "4 of 4"}
    assert {name: facts[name] for name in wanted} == wanted


OTHER_PROMPTS = tuple(PromptEntry(f"q{i}", "math", "chat", "x") for i in range(20))
REFUSED = {
    "ids": ({"prompts": OTHER_PROMPTS}, r"20 other prompts \(q0, q1, q10, q11, q12 and 15 more\)"),
    "order": ({"prompts": part("/m/b/head").prompts[::-1]}, "prompts in another order"),
    "dtype": ({"dtype": "bfloat16"}, "dtype bfloat16 for float32"),
    "length": ({"max_new_tokens": 17}, "max_new_tokens 17 for 16"),
    "seed": ({"seed": 1}, "seed 1 for 0"),
    "target": ({"target": {"weights_sha256": "bb"}}, "run.target.weights_sha256 bb for aa"),
    "no target": ({"target": None}, "run.target.weights_sha256 None for aa"),
    "versions": ({"versions": {"torch": "2.13.0"}}, "run.versions.torch 2.13.0 for 2.11.0"),
    "commit": ({"git": GIT | {"sha": "beef"}}, "run.git.sha beef for c0ffee"),
    "diff": ({"git": GIT | {"diff_sha256": "11"}}, "run.git.diff_sha256 11 for 00"),
    "gpu": ({"hardware": HARDWARE | {"gpus": []}}, r"run.hardware.gpus \[\] for \['H200'\]"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_parts_that_differ_are_refused_by_name(case: str) -> None:
    changed, expected = REFUSED[case]
    other = part("/m/b/head")
    fields = {key: value for key, value in changed.items() if key not in RUN}
    run = {key: changed.get(key, value) for key, value in other.run.items()}
    other = dataclasses.replace(other, **fields, run=run)
    with pytest.raises(ConfigError, match=f"got part1 beside part0 with {expected}; decode"):
        joined(part("/m/a/head"), other)


def test_untracked_files_and_memory_are_no_difference() -> None:
    changed = {"git": GIT | {"dirty": True}, "hardware": HARDWARE | {"memory_bytes": 2}}
    other = dataclasses.replace(part("/m/b/head"), run={**part("/m/b/head").run, **changed})
    made = joined(part("/m/a/head"), other)
    assert made.run["git"] == GIT | {"dirty": True}
    assert made.parts[1]["hardware"] == changed["hardware"]


def test_condition_in_two_parts_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"got head K=3 training, head K=3 training_norefresh in"):
        joined(part("/m/a/head"), part("/m/a/head"))


def test_heads_that_no_name_tells_apart_are_refused() -> None:
    a, b = (
        dataclasses.replace(study, run={**study.run, "argv": ["eval.py"]})
        for study in (part("/m/a/head"), part("/m/b/head", drafts=(5,)))
    )
    with pytest.raises(ConfigError, match="heads called head, got sha256 b/head for a/head in"):
        joined(a, b)


def test_command_writes_over_no_study_that_was_decoded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [tmp_path / name for name in "abc"]
    for folder in folders:
        write_study(folder, part(f"/m/{folder.name}/head"))
    words = list(map(str, folders[:2]))
    for taken in (folders[0], folders[2]):
        before = (taken / STUDY_FILE).read_text()
        assert main([*words, "--out", str(taken)]) == 2
        assert "--out must not hold a study that was decoded" in capsys.readouterr().err
        assert (taken / STUDY_FILE).read_text() == before
    assert main([*words, "--out", str(folders[0] / STUDY_FILE)]) == 4
    assert main([*words, str(tmp_path / "none"), "--out", str(tmp_path / "d")]) == 3
    damaged = json.loads((folders[1] / STUDY_FILE).read_text())
    damaged["summary"]["rows"][1]["lost"][0] = 0.0
    (folders[1] / STUDY_FILE).write_text(json.dumps(damaged))
    assert main([*words, "--out", str(tmp_path / "d")]) == 3
    assert not (tmp_path / "d").exists()
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert stopped.value.code == 2
