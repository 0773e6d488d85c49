"""The train-unroll x decode-policy matrix on a tiny target: all cells, and the checks in them."""

import copy
import dataclasses
import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from mtp_research.app.cli import compose_config
from mtp_research.config.schema import TrainConfig
from mtp_research.config.training_schema import MatrixConfig
from mtp_research.evaluation.stats.matrix_seeds import MATRIX_FILE, read_matrix
from mtp_research.heads.stack import ModuleOutput
from mtp_research.heads.weights import load_heads
from mtp_research.models.target import load_target
from mtp_research.policy.fields import MATCHING_POLICY
from mtp_research.runtime.errors import ConfigError, IntegrityError, Interrupted, NumericFault
from mtp_research.studies import matrix_cell, matrix_workers
from mtp_research.studies.matrix_workers import changed_settings, decoded_as, unrolls_of
from mtp_research.studies.policy_matrix import run_policy_matrix
from mtp_research.studies.study_tables import group_figures, matrix_grids, matrix_summary
from mtp_research.studies.tables import main
from mtp_research.training.setup import load_inputs
from tests.tiny import tiny_heads, tiny_target
from tests.training.tiny import save_lab


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    config = save_lab(tmp_path_factory.mktemp("lab"), num_documents=24)
    config.matrix = MatrixConfig(num_mtp_modules=[1, 2], num_prompts=4, max_new_tokens=20)
    config.trainer = dataclasses.replace(config.trainer, max_steps=4)
    config.task = "matrix"
    return config


@pytest.fixture
def two_seeds(config):
    matrix = MatrixConfig(
        num_mtp_modules=[2],
        unrolls=["chain"],
        policies=["training", "eagle"],
        seeds=[3, 5],
        num_prompts=4,
        max_new_tokens=16,
    )
    return dataclasses.replace(config, matrix=matrix)


def test_matrix_walk_equals_loop_in_every_cell(config, tmp_path, capsys):
    result = run_policy_matrix(config, tmp_path)
    cells = {(c["unroll"], c["num_mtp_modules"], c["policy"]): c for c in result["cells"]}
    heads = [("chain", 1), ("ttt", 1), ("independent", 1)]
    heads += [("chain", 2), ("shared_context", 2), ("independent", 2)]
    policies = ["training", "eagle", "target_roll"]
    assert list(cells) == [(*head, policy) for head in heads for policy in policies]
    for (unroll, _, policy), cell in cells.items():
        assert cell["is_match"] == (MATCHING_POLICY[unroll] == policy)
        assert cell["num_rounds"] >= 30
        if policy != "target_roll":
            assert cell["acceptance_length"] == cell["clean_length"]
    rolled = [cell for cell in result["cells"] if cell["policy"] == "target_roll"]
    assert any(cell["acceptance_length"] != cell["clean_length"] for cell in rolled)
    assert "shared_context N=2" in capsys.readouterr().err
    stored = read_matrix(tmp_path)
    assert {(c.num_other_texts, c.num_other_rounds) for c in stored.cells} == {(0, 0)}


def test_matrix_cell_whose_walk_differs_is_a_fault(config, tmp_path, monkeypatch):
    config = dataclasses.replace(config)
    config.matrix = MatrixConfig(
        num_mtp_modules=[2], unrolls=["chain"], policies=["eagle"], num_prompts=3
    )
    # The walk of another policy stands for any error in either of the two.
    monkeypatch.setitem(matrix_cell.WALK_UNROLL, "eagle", "independent")
    with pytest.raises(NumericFault, match=r"chain_n2_s0 under eagle"):
        run_policy_matrix(config, tmp_path)
    config.matrix = dataclasses.replace(config.matrix, max_differing_share=1.0)
    run_policy_matrix(config, tmp_path)
    (cell,) = read_matrix(tmp_path).cells
    assert cell.num_other_rounds > 0
    assert cell.num_other_texts == 0


def test_killed_matrix_goes_on_in_two_processes(two_seeds, tmp_path, monkeypatch, capsys):
    whole = run_policy_matrix(two_seeds, tmp_path / "whole")
    measured, measure = [], matrix_workers.measure_cell

    def dies_at_the_fourth(heads, records, **kwargs):
        measured.append(kwargs["policy"])
        if len(measured) == 4:
            raise KeyboardInterrupt
        return measure(heads, records, **kwargs)

    monkeypatch.setattr(matrix_workers, "measure_cell", dies_at_the_fourth)
    with pytest.raises(KeyboardInterrupt):
        run_policy_matrix(two_seeds, tmp_path / "killed")
    half = read_matrix(tmp_path / "killed")
    assert half.done_seeds == (3,)
    assert {len(one.by_seed) for one in group_figures(half)} == {1}
    # The head of seed 5 is trained, its second cell is missing: workers must find both.
    trained = {path: path.stat().st_mtime_ns for path in tmp_path.glob("killed/*/trained.json")}
    two_seeds = dataclasses.replace(
        two_seeds,
        matrix=dataclasses.replace(two_seeds.matrix, num_workers=2),
        output_dir="as typed from another folder",
        logger=dataclasses.replace(two_seeds.logger, tags=["again"]),
    )
    assert run_policy_matrix(two_seeds, tmp_path / "killed")["cells"] == whole["cells"]
    assert {path: path.stat().st_mtime_ns for path in trained} == trained
    assert len(trained) == 2
    assert len(measured) == 4  # no cell was measured in this process
    assert read_matrix(tmp_path / "killed").cells == read_matrix(tmp_path / "whole").cells
    assert main(["seeds", str(tmp_path / "killed")]) == 0
    assert "2 of 2 seeds" in capsys.readouterr().out


def test_matrix_that_is_stopped_names_its_own_folder(two_seeds, tmp_path, monkeypatch):
    def stopped(config, folder):
        raise Interrupted(
            f"stopped by SIGTERM after step 2; the same command with {folder} goes on."
        )

    monkeypatch.setattr(matrix_workers, "train_heads", stopped)
    said = f"^stopped by SIGTERM after step 2; the same command with output_dir={tmp_path} goes on"
    with pytest.raises(Interrupted, match=said):
        run_policy_matrix(two_seeds, tmp_path)


def test_heads_trained_in_bfloat16_are_decoded_in_float32(two_seeds, tmp_path, monkeypatch):
    model = dataclasses.replace(two_seeds.model, dtype="bfloat16")
    matrix = dataclasses.replace(two_seeds.matrix, dtype="float32", seeds=[3])
    config = dataclasses.replace(two_seeds, model=model, matrix=matrix)
    run_policy_matrix(config, tmp_path)  # no text and no round may differ
    assert read_matrix(tmp_path).settings["dtype"] == "float32"
    weights = load_file(tmp_path / "chain_n2_s3" / "head" / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    state = []
    monkeypatch.setattr(matrix_workers, "_worker_state", state)
    monkeypatch.setattr(matrix_workers, "_stop_with", lambda parent: None)
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)  # this process has others
    places = SimpleNamespace(get=lambda: matrix_workers._Place(0, 1, 0, parent=0))
    matrix_workers._start_worker(config, None, places)
    assert state[0][1].dtype == torch.float32


def test_matrix_file_gives_its_own_summary_again(two_seeds, tmp_path):
    run_policy_matrix(two_seeds, tmp_path)
    stored = json.loads((tmp_path / MATRIX_FILE).read_text())
    matrix = read_matrix(tmp_path)
    assert json.loads(json.dumps(matrix_summary(matrix))) == stored["summary"]
    match, other = group_figures(matrix)
    assert match.is_match
    assert match.minus_match is None
    value = other.length.value - match.length.value
    assert other.minus_match.value == pytest.approx(value, abs=1e-12)
    assert other.length.value == pytest.approx(sum(other.by_seed) / 2, abs=1e-12)
    heat = stored["summary"]["heat_maps"]
    assert [one["domain"] for one in heat] == [None, "code", "math"]
    assert heat[0]["values"] == [[match.length.value, other.length.value]]
    assert len(matrix_grids(matrix)) == 5
    assert {"config_sha256", "weights_sha256"} < set(matrix.run["target"])
    changed = dataclasses.replace(two_seeds, seed=9)
    with pytest.raises(IntegrityError, match=r"other prompts or settings \(config\.seed\)"):
        run_policy_matrix(changed, tmp_path)
    stored["cells"][0]["accepted_per_round"][0][0] = 9
    (tmp_path / MATRIX_FILE).write_text(json.dumps(stored))
    assert main(["seeds", str(tmp_path)]) == 3


def test_recycle_norms_are_trained_and_decoded_crosswise(config, tmp_path):
    config = dataclasses.replace(config)
    config.matrix = MatrixConfig(
        num_mtp_modules=[2],
        unrolls=["chain"],
        policies=["training"],
        recycle_norms=["post_norm", "pre_norm"],
        num_prompts=4,
        max_new_tokens=16,
    )
    cells = run_policy_matrix(config, tmp_path)["cells"]
    norms = [(c["recycle_norm"], c["decode_recycle_norm"], c["is_match"]) for c in cells]
    assert norms == [
        ("post_norm", "post_norm", True),
        ("post_norm", "pre_norm", False),
        ("pre_norm", "post_norm", False),
        ("pre_norm", "pre_norm", True),
    ]
    record = json.loads((tmp_path / "chain_n2_pre_norm_s0" / "head" / "head.json").read_text())
    assert record["spec"]["recycle_norm"] == "pre_norm"
    (grid, *_, positions) = [
        grid
        for grid in matrix_grids(read_matrix(tmp_path))
        if not grid.title.startswith("Acceptance length, c")
        and not grid.title.startswith("Acceptance length, m")
    ]
    assert positions.header[-2:] == ("the same at fixed anchors", "repeated rounds")
    (group, *_) = group_figures(read_matrix(tmp_path))
    assert positions.rows[0][-2] == " ".join(f"{rate:.3f}" for rate in group.anchor_rates)
    assert positions.rows[0][-1] == f"{group.repeated_share:.1%}"
    assert [row[0] for row in grid.rows] == ["chain N=2", "chain N=2 pre_norm"]
    assert grid.header == ("heads", "training", "training as pre_norm", "training as post_norm")


@pytest.mark.parametrize(
    ("stored", "is_same"),
    [({"a": {"b": 1}}, True), ({"a": {"b": 1, "gone": 2}}, True), ({"a": {"b": 2}}, False)],
)
def test_settings_of_another_schema_are_compared_in_common_keys(stored, is_same):
    assert (changed_settings(stored, {"a": {"b": 1}, "new": 3}) == []) == is_same


def test_decoded_as_feeds_the_other_vector_and_leaves_the_heads_alone():
    heads = tiny_heads(tiny_target("qwen3"), num_mtp_modules=1)
    view = decoded_as(heads, "pre_norm")
    output = ModuleOutput(pre_norm=torch.zeros(1), post_norm=torch.ones(1))
    assert (view.recycled(output).item(), heads.recycled(output).item()) == (0, 1)
    assert view.mtp_modules is heads.mtp_modules


@pytest.mark.parametrize(
    ("num_mtp_modules", "expected"),
    [(1, ["chain", "ttt", "independent"]), (3, ["chain", "shared_context", "independent"])],
)
def test_unrolls_of_leaves_out_the_twin(num_mtp_modules, expected):
    wanted = ["chain", "ttt", "shared_context", "independent"]
    assert unrolls_of(num_mtp_modules, wanted=wanted) == expected


@pytest.mark.parametrize(
    "words",
    [
        *(["matrix.num_mtp_modules=[0]"], ["objective.num_depths=2"], ["matrix.seeds=[1,1]"]),
        # No head at all, or none that is decoded.
        ["matrix.unrolls=[ttt]", "matrix.num_mtp_modules=[2]"],
        *([f"matrix.{name}=[]"] for name in ("num_mtp_modules", "unrolls", "policies")),
    ],
)
def test_matrix_of_impossible_heads_is_refused(words):
    with pytest.raises(ConfigError, match=r"must (lie in|be at least|hold)"):
        compose_config(TrainConfig, ["experiment=policy_matrix_tiny", *words])


@pytest.mark.parametrize("policy", ["training", "target_roll"])
def test_cell_counts_no_round_behind_the_stop_token(policy):
    target = tiny_target("qwen3", dtype=torch.float32)
    heads = tiny_heads(target, num_mtp_modules=2)
    prompts = [(9, 17, 33, 5, 64), (70, 71, 8, 99, 23, 40)]
    decoded = {"policy": policy, "num_drafts": 3}
    records = matrix_cell.decode_prompts(target, heads, prompts, **decoded, num_new=32)
    whole = matrix_cell.measure_cell(heads, records, prompts=prompts, **decoded)
    text = records[0].output_token_ids
    stop = next(at for at in range(12, 32) if text[at] not in text[:at])
    target.model.generation_config.eos_token_id = [text[stop]]
    ended = matrix_cell.measure_cell(heads, records, prompts=prompts, **decoded)
    newest, wanted = 0, []  # index of the newest token of a round in the answer
    for count in records[0].num_accepted_per_round:
        if newest < stop:
            wanted.append(count)
        newest += count + 1
    assert ended.loop[0] == tuple(wanted)
    assert len(ended.loop[0]) < len(whole.loop[0])
    assert ended.differing == ()
    # The text is one for all policies, and so are the anchors: module 1 drafts the same everywhere.
    other = matrix_cell.measure_cell(heads, records, prompts=prompts, policy="eagle", num_drafts=3)
    assert ended.anchor_rates[0] == other.anchor_rates[0] > 0
    assert list(ended.anchor_rates) == sorted(ended.anchor_rates, reverse=True)


def test_rounds_that_repeat_six_tokens_are_counted():
    text = [1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 4, 5, 6, 7, 9]
    # Rounds know 7 tokens, 12 (1..5 follows 7, new), 13 (1..6 again) and 14 (2..7 again).
    assert matrix_cell.num_repeated_rounds(text, (4, 0, 0, 0), start=5) == 2
    assert matrix_cell.num_repeated_rounds(text, (4, 0), start=5) == 0


def test_heads_of_another_schedule_are_walked_and_decoded_with_it():
    target = load_target("assets/lab_tiny/target", dtype="float32", device="cpu")
    heads = load_heads("assets/lab_tiny/heads/chain_n3", target)
    prompts = [tuple(range(200, 212)), tuple(range(900, 908))]
    decoded = {"policy": "training", "num_drafts": 5}
    cells = []
    for schedule in ("cycle", "last"):
        heads.spec = dataclasses.replace(heads.spec, module_schedule=schedule)
        records = matrix_cell.decode_prompts(target, heads, prompts, **decoded, num_new=40)
        cells.append(matrix_cell.measure_cell(heads, records, prompts=prompts, **decoded))
        assert cells[-1].differing == ()  # the walk's rounds are the loop's
    assert cells[0].anchor_rates[:3] == cells[1].anchor_rates[:3]
    assert cells[0].loop != cells[1].loop  # drafts 4 and 5 are module 2's in place of 0's and 1's


def test_prompts_of_other_files_are_decoded_unless_training_has_them(two_seeds, tmp_path):
    trained = load_inputs(two_seeds).documents.train[0]
    lines = [{"id": "seen", "token_ids": list(trained.token_ids), "num_prompt_tokens": 6}]
    lines += [
        {"id": f"new{index}", "token_ids": [7, index, 11, 90, 5, 6, 7], "num_prompt_tokens": 5}
        for index in (20, 30)
    ]
    lines.append({"id": "plain", "token_ids": [1, 20, 30, 40], "num_prompt_tokens": 1})
    path = tmp_path / "dev.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = dataclasses.replace(two_seeds, data=copy.deepcopy(two_seeds.data))
    config.matrix = dataclasses.replace(two_seeds.matrix, prompts=[str(path)], seeds=[3])
    run_policy_matrix(config, tmp_path / "run")
    matrix = read_matrix(tmp_path / "run")
    assert [prompt.id for prompt in matrix.prompts] == ["new20", "new30"]
    assert matrix.settings["config"]["matrix"]["prompts"] == [str(path)]
