"""Training runs on a tiny target: learning, resume, signals, bad steps, accumulation."""

import copy
import dataclasses
import hashlib
import json
import math
import os
import shutil
import signal
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from mtp_research.config.schema import TrainConfig
from mtp_research.heads.record import read_head_record
from mtp_research.heads.weights import load_heads
from mtp_research.models.families import FAMILIES
from mtp_research.models.target import load_target
from mtp_research.runtime.errors import ConfigError, IntegrityError, Interrupted, NumericFault
from mtp_research.training import loop, setup
from mtp_research.training.checkpoint import check_same_run, run_settings
from mtp_research.training.documents import warn_of_writer
from mtp_research.training.loop import accumulate_gradients, train_heads
from mtp_research.training.losses.losses import UnrollSpec
from mtp_research.training.setup import build_heads, build_run, export_note, make_accelerator
from mtp_research.training.tracking import StopRequest
from tests.oracle import DRAFTS
from tests.tiny import to_float64
from tests.training.tiny import save_lab


@pytest.fixture(scope="module")
def lab(tmp_path_factory) -> TrainConfig:
    return save_lab(tmp_path_factory.mktemp("lab"))


def changed(config: TrainConfig, **overrides: object) -> TrainConfig:
    """A copy with `section__key=value` set."""
    config = copy.deepcopy(config)
    for path, value in overrides.items():
        *sections, key = path.split("__")
        holder = config
        for section in sections:
            holder = getattr(holder, section)
        assert hasattr(holder, key), path
        setattr(holder, key, value)
    return config


def fingerprint(folder) -> dict[str, str]:
    """sha256 of every tensor file of a step folder."""
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) == 2
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def contents(folder) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def metrics(folder, kind: str) -> list[dict]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def spoil(monkeypatch, *, steps, action):
    """Run `action(parts, stats)` after the gradients of the given steps; it returns the stats."""
    plain = loop.accumulate_gradients

    def wrapped(parts, *, step, **arguments):
        stats = plain(parts, step=step, **arguments)
        return action(parts, stats) if step in steps else stats

    monkeypatch.setattr(loop, "accumulate_gradients", wrapped)


def spoilt(parts, stats, *, value):
    """A step whose loss is `value`, with the gradients that such a loss leaves."""
    for parameter in parts.heads.parameters():
        parameter.grad.fill_(math.nan)
    return stats._replace(loss=torch.tensor(value))


@pytest.mark.parametrize(
    ("unroll", "num_mtp_modules", "policy"),
    [("chain", 3, "training"), ("ttt", 1, "eagle")],
    ids=["chain-n3", "ttt-n1"],
)
def test_train_heads_walk_rises_and_equals_the_decode_oracle(
    lab, tmp_path, unroll, num_mtp_modules, policy
):
    config = changed(
        lab,
        objective__unroll=unroll,
        head__num_mtp_modules=num_mtp_modules,
        trainer__max_steps=48,
        trainer__learning_rate=5e-3,
        trainer__eval_every=24,
    )
    result = train_heads(config, tmp_path)
    assert result["acceptance_length"] > result["acceptance_length_before"] + 0.1
    json.dumps(result, allow_nan=False)
    losses = [line["loss"] for line in metrics(tmp_path, "train")]
    assert len(losses) == 48
    assert losses[-1] < losses[0]
    assert [line["step"] for line in metrics(tmp_path, "eval")] == [0, 24, 48]
    assert read_head_record(tmp_path / "head")["spec"]["unroll"] == unroll

    target = load_target(config.model.path, device="cpu")
    heads = load_heads(tmp_path / "head", target)
    parts = build_run(config, accelerator=make_accelerator(config))
    num_accepted, num_rounds = 0, 0
    for document in parts.documents.held_out:
        accepted = oracle_loop(heads, list(document.token_ids), num_prompt_tokens=6, policy=policy)
        num_accepted, num_rounds = num_accepted + sum(accepted), num_rounds + len(accepted)
    assert num_rounds == result["num_rounds"]
    assert result["acceptance_length"] == pytest.approx(1 + num_accepted / num_rounds)


def oracle_loop(heads, text, *, num_prompt_tokens, policy, num_drafts=3) -> list[int]:
    """Accepted drafts of every round whose drafts lie inside `text`, drafts recomputed densely."""
    known, accepted_per_round = num_prompt_tokens + 1, []
    while known + num_drafts <= len(text):
        drafts, _ = DRAFTS[policy](heads, text[:known], num_drafts)
        accepted = 0
        while accepted < num_drafts and drafts[accepted] == text[known + accepted]:
            accepted += 1
        accepted_per_round.append(accepted)
        known += accepted + 1
    return accepted_per_round


def test_train_heads_changes_heads_only(lab, tmp_path, monkeypatch):
    seen = {}

    def watched(config, **arguments):
        parts = build_run(config, **arguments)
        model = parts.heads.target.model
        seen["model"], seen["before"] = model, copy.deepcopy(model.state_dict())
        seen["heads"], seen["heads_before"] = parts.heads, copy.deepcopy(parts.heads.state_dict())
        return parts

    monkeypatch.setattr(loop, "build_run", watched)
    train_heads(lab, tmp_path)
    for name, tensor in seen["model"].state_dict().items():
        assert torch.equal(tensor, seen["before"][name]), name
    moved = [
        name
        for name, parameter in seen["heads"].named_parameters()
        if not torch.equal(parameter, seen["heads_before"][name])
    ]
    assert len(moved) == len(list(seen["heads"].parameters()))
    assert not any("embed_tokens" in name or "lm_head" in name for name in moved)


@pytest.mark.parametrize("recipe", ["qwen3", "glm4_moe"])
def test_train_heads_resumed_run_is_bit_identical(tmp_path, monkeypatch, recipe):
    config = changed(
        save_lab(tmp_path, recipe=recipe),
        trainer__gradient_accumulation_steps=2,
        trainer__save_every=3,
        trainer__keep_last=9,
        trainer__eval_every=2,
    )
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    whole = train_heads(config, straight)

    def crash(parts, stats):
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        spoil(patch, steps={4}, action=crash)
        with pytest.raises(ZeroDivisionError):
            train_heads(config, resumed)
    assert (resumed / "latest").read_text() == "step_000003\n"
    result = train_heads(config, resumed)

    assert fingerprint(resumed / "step_000006") == fingerprint(straight / "step_000006")
    assert fingerprint(resumed / "step_000003") != fingerprint(straight / "step_000006")
    assert result["acceptance_length_before"] == whole["acceptance_length_before"]
    assert result["length_by_domain"] == whole["length_by_domain"]
    assert [line["step"] for line in metrics(resumed, "train")] == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in metrics(resumed, "eval")] == [0, 2, 4, 6]
    expected = [line["loss"] for line in metrics(straight, "train")]
    assert [line["loss"] for line in metrics(resumed, "train")] == expected


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_train_heads_signal_saves_and_resumes(lab, tmp_path, monkeypatch, number):
    def send(parts, stats):
        os.kill(os.getpid(), number)
        return stats

    handler = signal.getsignal(number)
    with monkeypatch.context() as patch:
        spoil(patch, steps={1}, action=send)
        with pytest.raises(Interrupted, match=number.name) as fault:
            train_heads(lab, tmp_path / "stopped")
    assert fault.value.exit_code == 75
    assert signal.getsignal(number) is handler
    # The signal came after the sums of step 2, which share it over ranks: step 3 carries it, and
    # its figures are read one step late.
    assert (tmp_path / "stopped" / "latest").read_text() == "step_000004\n"
    train_heads(lab, tmp_path / "stopped")
    train_heads(lab, tmp_path / "straight")
    name = "step_000006"
    assert fingerprint(tmp_path / "stopped" / name) == fingerprint(tmp_path / "straight" / name)


def test_train_heads_changed_setting_is_refused_with_a_diff(lab, tmp_path):
    train_heads(lab, tmp_path)
    (tmp_path / ".writing-step_000009-1").mkdir()  # which a crash left
    (tmp_path / ".writing-step_000009-1" / "head.safetensors").write_bytes(b"")
    before, described = contents(tmp_path), []
    with pytest.raises(ConfigError) as fault:
        train_heads(
            changed(lab, seed=5, trainer__max_steps=9),
            tmp_path,
            on_start=lambda: described.append("refused"),
        )
    assert (contents(tmp_path), described) == (before, [])
    assert "seed: checkpoint 0, now 5" in str(fault.value)
    assert "trainer.max_steps: checkpoint 6, now 9" in str(fault.value)
    with pytest.raises(ConfigError, match=r"trainer\.resume"):
        train_heads(changed(lab, trainer__resume="never"), tmp_path)
    train_heads(lab, tmp_path, on_start=lambda: described.append("taken"))
    assert described == ["taken"]


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        ({"objective__num_depths": 4}, "objective.num_depths: checkpoint 3, now 4"),
        ({"head__module_schedule": "last"}, "head.module_schedule: checkpoint 'cycle', now 'last'"),
        ({"trainer__batch_size": 2}, "trainer.batch_size: checkpoint 4, now 2"),
    ],
    ids=["k", "schedule", "batch"],
)
def test_resume_with_another_setting_names_both_values(lab, tmp_path, overrides, line):
    train_heads(changed(lab, trainer__max_steps=1), tmp_path)
    with pytest.raises(ConfigError) as fault:
        train_heads(changed(lab, trainer__max_steps=1, **overrides), tmp_path)
    assert line in str(fault.value)
    assert fault.value.exit_code == 2


def test_resume_with_a_sibling_of_the_target_is_refused(lab, tmp_path):
    train_heads(changed(lab, trainer__max_steps=1), tmp_path / "run")
    sibling = shutil.copytree(lab.model.path, tmp_path / "sibling")
    tensors = load_file(sibling / "model.safetensors")
    (name,) = (name for name in tensors if name.endswith("layers.0.self_attn.q_proj.weight"))
    tensors[name] = tensors[name] + 0.01  # one matrix: embedding, lm_head and norms are as before
    save_file(tensors, sibling / "model.safetensors", metadata={"format": "pt"})
    for max_steps in (1, 2):  # also of a run that has ended
        other = changed(lab, model__path=str(sibling), trainer__max_steps=max_steps)
        with pytest.raises(ConfigError, match="model_sha256: checkpoint"):
            train_heads(other, tmp_path / "run")


def test_training_that_never_grew_says_so(lab, tmp_path, capsys):
    train_heads(changed(lab, trainer__learning_rate=1e-12), tmp_path / "none")
    assert "the held-out length never grew" in " ".join(capsys.readouterr().err.split())
    train_heads(lab, tmp_path / "some")
    assert "never grew" not in capsys.readouterr().err


def test_answers_of_another_model_and_modules_that_no_release_holds_are_named(lab, caplog):
    target = load_target(lab.model.path, dtype="float32", device="cpu")
    source = Path(lab.data.path)
    source.with_name(f"{source.name}.settings.json").write_text('{"weights_sha256": "other"}')
    try:
        warn_of_writer(lab.data.path, target=target)
    finally:
        source.with_name(f"{source.name}.settings.json").unlink()
    assert "was written by another model than model.path" in caplog.text
    caplog.clear()
    warn_of_writer(lab.data.path, target=target)
    assert not caplog.text
    several, one = (
        build_heads(changed(lab, head__num_mtp_modules=number), target=target) for number in (3, 1)
    )
    assert "head.num_mtp_modules=3: checkpoints of family qwen3 hold one module" in str(
        export_note(several)
    )
    assert export_note(one) is None
    assert FAMILIES["glm4_moe"].native.numbers_modules  # as GLM-4.5's, whose layers go on counting


def test_resume_on_another_number_of_ranks_is_refused(lab):
    parts = build_run(lab, accelerator=make_accelerator(lab))
    settings = run_settings(
        lab,
        heads=parts.heads,
        num_depths=3,
        data_sha256=parts.documents.data_sha256,
        world_size=2,
    )
    with pytest.raises(ConfigError, match="world_size: checkpoint 1, now 2"):
        check_same_run(parts.settings, settings)


def test_train_heads_finished_run_reports_again_without_training(lab, tmp_path):
    first = train_heads(lab, tmp_path)
    before = fingerprint(tmp_path / "step_000006")
    again = train_heads(lab, tmp_path)
    assert again["acceptance_length"] == first["acceptance_length"]
    assert fingerprint(tmp_path / "step_000006") == before
    for name in ("seconds", "train_tokens_per_s", "speed"):  # of the steps, which were not repeated
        assert again[name] == first[name]
    assert [line["train_tokens_per_s"] for line in metrics(tmp_path, "result")] == [
        first["train_tokens_per_s"]
    ]


def test_train_heads_explicit_damaged_step_is_refused(lab, tmp_path):
    train_heads(changed(lab, trainer__save_every=3), tmp_path)
    path = tmp_path / "step_000006" / "optimizer.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(IntegrityError, match=r"optimizer\.safetensors"):
        train_heads(changed(lab, trainer__resume=str(path.parent)), tmp_path)


def test_train_heads_non_finite_step_is_skipped_and_counted(lab, tmp_path, monkeypatch):
    def bad_loss(parts, stats):
        return spoilt(parts, stats, value=math.nan)

    def bad_gradient(parts, stats):
        next(parts.heads.parameters()).grad.fill_(math.inf)
        return stats

    spoil(monkeypatch, steps={1}, action=bad_loss)
    spoil(monkeypatch, steps={3}, action=bad_gradient)
    result = train_heads(lab, tmp_path)
    assert result["num_skipped"] == 2
    assert [line["loss"] is None for line in metrics(tmp_path, "train")].count(True) == 1
    heads = load_heads(tmp_path / "head", load_target(lab.model.path, device="cpu"))
    assert all(torch.isfinite(parameter).all() for parameter in heads.parameters())


def test_train_heads_ten_non_finite_steps_in_a_row_end_the_run(lab, tmp_path, monkeypatch):
    spoil(monkeypatch, steps=range(2, 99), action=partial(spoilt, value=math.inf))
    with pytest.raises(NumericFault, match="10 steps in a row") as fault:
        train_heads(changed(lab, trainer__max_steps=20), tmp_path)
    assert fault.value.exit_code == 5
    assert metrics(tmp_path, "train")[-1]["step"] == 12


def walks(monkeypatch, *lengths):
    """Let the held-out walk report these acceptance lengths, one an evaluation."""
    plain, left = loop.measure_held_out, list(lengths)

    def measured(*arguments, **keys):
        report = plain(*arguments, **keys)
        return dataclasses.replace(report, acceptance_length=left.pop(0))

    monkeypatch.setattr(loop, "measure_held_out", measured)
    return left


def test_train_heads_exports_the_heads_of_the_longest_walk(lab, tmp_path, monkeypatch):
    walks(monkeypatch, 1.0, 1.5, 3.0, 2.0)
    config = changed(lab, trainer__eval_every=2, trainer__save_every=2, trainer__keep_last=9)
    result = train_heads(config, tmp_path)
    assert (result["best_step"], result["num_steps"]) == (4, 6)
    assert (result["acceptance_length"], result["acceptance_length_last"]) == (3.0, 2.0)
    exported = load_file(tmp_path / "head" / "model.safetensors")
    best = load_file(tmp_path / "step_000004" / "head.safetensors")
    last = load_file(tmp_path / "step_000006" / "head.safetensors")
    assert all(torch.equal(exported[name], best[name]) for name in best)
    assert not all(torch.equal(exported[name], last[name]) for name in last)
    provenance = read_head_record(tmp_path / "head")["provenance"]
    assert provenance["step"] == 4
    assert not {"matrix", "launcher"} & provenance["config"].keys()
    assert "pretrain" not in provenance["config"]["model"]
    assert provenance["held_out_walk"]["acceptance_length"] == 3.0


def test_train_heads_stops_early_and_stays_stopped(lab, tmp_path, monkeypatch):
    left = walks(monkeypatch, 1.0, 2.0, 1.9, 1.8, 9.0)
    config = changed(
        lab, trainer__max_steps=20, trainer__eval_every=2, trainer__early_stopping_patience=2
    )
    result = train_heads(config, tmp_path)
    assert (result["best_step"], result["num_steps"], left) == (2, 6, [9.0])
    assert (tmp_path / "latest").read_text() == "step_000006\n"
    again = train_heads(config, tmp_path)
    assert (again["num_steps"], left) == (6, [9.0])


def test_train_heads_frozen_parts_are_bit_identical_and_not_optimised(tmp_path):
    config = changed(save_lab(tmp_path, recipe="glm4_moe"), head__freeze=["experts"])
    before = build_run(config, accelerator=make_accelerator(config)).heads.state_dict()
    train_heads(config, tmp_path / "run")
    after = load_file(tmp_path / "run" / "step_000006" / "head.safetensors")
    trained = [name for name in after if not torch.equal(after[name], before[name])]
    assert trained
    assert not [name for name in trained if ".experts." in name]
    optimizer = load_file(tmp_path / "run" / "step_000006" / "optimizer.safetensors")
    assert not [name for name in optimizer if ".experts." in name]
    for line in metrics(tmp_path / "run", "train"):
        assert line["expert_load_max"] > 1 > line["expert_load_min"] >= 0


def test_sampled_length_is_measured_on_sampled_text_alone(tmp_path, capsys):
    config = save_lab(tmp_path, num_documents=24)
    config = changed(config, trainer__max_steps=1, head__num_mtp_modules=1)
    beside = tmp_path / "answers.jsonl.settings.json"
    for temperature, is_measured in ((0.0, False), (1.0, True)):
        beside.write_text(json.dumps({"temperature": temperature, "top_p": 1.0, "top_k": 0}))
        result = train_heads(config, tmp_path / f"run_{temperature}")
        (last, *_) = reversed(metrics(tmp_path / f"run_{temperature}", "eval"))
        assert (last["sampled_acceptance_length"] is not None) == is_measured
        assert (result["sampled_length_not_measured"] is None) == is_measured
        printed = capsys.readouterr().err
        assert ("sampled_acceptance_length is nan" in " ".join(printed.split())) != is_measured
        assert "data: 18 training and" in printed
    assert "expert_load_max" not in metrics(tmp_path / "run_1.0", "train")[0]
    record = read_head_record(tmp_path / "run_0.0" / "head")
    assert record["provenance"]["data"]["num_held_out_dropped"] == 0
    assert record["provenance"]["config"]["head"]["init_noise"] > 0


def test_train_heads_replicates_one_trained_module(lab, tmp_path):
    one = changed(lab, head__num_mtp_modules=1, trainer__max_steps=2)
    train_heads(one, tmp_path / "one")
    config = changed(lab, head__init="replicate", head__path=str(tmp_path / "one" / "head"))
    heads = build_run(config, accelerator=make_accelerator(config)).heads
    expected = load_file(tmp_path / "one" / "head" / "model.safetensors")
    for module in heads.mtp_modules:
        for name, tensor in module.state_dict().items():
            assert torch.equal(tensor, expected[f"mtp_modules.0.{name}"]), name


def test_train_heads_from_a_head_of_other_conventions_is_refused(lab, tmp_path):
    train_heads(changed(lab, trainer__max_steps=1), tmp_path / "one")
    config = changed(lab, head__path=str(tmp_path / "one" / "head"))
    assert build_run(config, accelerator=make_accelerator(config)).heads.training
    other = changed(config, head__recycle_norm="pre_norm")
    with pytest.raises(ConfigError, match=r"set head\.recycle_norm=post_norm"):
        build_run(other, accelerator=make_accelerator(other))
    path = tmp_path / "one" / "head" / "head.json"
    record = json.loads(path.read_text())
    record["spec"]["owns_lm_head"] = True
    path.write_text(json.dumps(record))
    with pytest.raises(ConfigError, match="output projections of its own"):
        build_run(config, accelerator=make_accelerator(config))


def test_train_heads_runs_the_decode_loop_at_each_evaluation(lab, tmp_path):
    seen = []

    def decode_eval(heads):
        seen.append(heads.training)
        return {"acceptance_length": 1.0 + len(seen)}

    train_heads(changed(lab, trainer__eval_every=3), tmp_path, decode_eval=decode_eval)
    assert seen == [False, False, False]
    assert [line["step"] for line in metrics(tmp_path, "decode")] == [0, 3, 6]


def test_train_heads_recomputing_activations_changes_no_bit(lab, tmp_path):
    train_heads(lab, tmp_path / "plain")
    train_heads(changed(lab, trainer__activation_checkpointing=True), tmp_path / "recomputed")
    plain, recomputed = (fingerprint(tmp_path / n / "step_000006") for n in ("plain", "recomputed"))
    assert plain == recomputed


def test_accumulate_gradients_split_step_equals_whole_step(lab):
    gradients, losses = [], []
    for batch_size, num_micro in ((4, 1), (1, 4)):
        config = changed(
            lab,
            model__dtype="float64",
            trainer__batch_size=batch_size,
            trainer__gradient_accumulation_steps=num_micro,
        )
        accelerator = make_accelerator(config)
        parts = build_run(config, accelerator=accelerator)
        to_float64(parts.heads.target.model)
        to_float64(parts.heads)
        stats = accumulate_gradients(
            parts, config=config, ranks=accelerator, step=0, stop=StopRequest()
        )
        losses.append(stats.loss.item())
        gradients.append([parameter.grad for parameter in parts.heads.parameters()])
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)
    for whole, split in zip(*gradients, strict=True):
        assert (whole - split).abs().max() < 1e-12
        assert whole.abs().max() > 0


def test_build_run_derives_the_number_of_depths(lab):
    for num_modules, num_depths in ((1, 3), (3, 3), (5, 5)):
        config = changed(lab, head__num_mtp_modules=num_modules)
        parts = build_run(config, accelerator=make_accelerator(config))
        assert parts.unroll_spec == UnrollSpec(num_depths, "chain", "cycle")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"head__init": "native"}, "head.init=native"),
        ({"trainer__precision": "bfloat16", "model__dtype": "float32"}, "trainer.precision"),
        ({"data__eval_documents": 60}, "data.eval_documents"),
        ({"data__path": "nowhere.jsonl"}, "data.path"),
        ({"objective__unroll": "ttt"}, "shared_context"),
    ],
    ids=["native", "precision", "held-out", "data", "ttt-n3"],
)
def test_train_heads_settings_that_do_not_fit_name_the_key(lab, tmp_path, overrides, message):
    with pytest.raises(ConfigError, match=message):
        train_heads(changed(lab, **overrides), tmp_path)


@pytest.mark.parametrize(
    ("device", "compiles", "is_started"),
    [("cuda", True, True), ("cuda", False, False), ("cpu", True, False)],
)
def test_compilers_of_a_gpu_start_before_the_target_is_loaded(
    lab, monkeypatch, device, compiles, is_started
):
    """On a CPU there is no core that waits for them."""
    started = []

    def load_inputs(*_, **__):
        raise LookupError

    monkeypatch.setattr(setup, "start_compilers", lambda: started.append("compilers"))
    monkeypatch.setattr(setup, "load_inputs", load_inputs)
    config = copy.deepcopy(lab)
    config.trainer.compile = compiles
    ranks = SimpleNamespace(device=torch.device(device), num_processes=1)
    with pytest.raises(LookupError):
        build_run(config, accelerator=ranks)
    assert started == ["compilers"] * is_started
