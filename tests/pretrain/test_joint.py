"""A target and its MTP modules trained together, and what becomes of the modules afterwards."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional

from mtp_research.config.rules import validate
from mtp_research.config.schema import EngineConfig, ModelConfig, TrainConfig
from mtp_research.config.training_schema import DataConfig, HeadConfig, TrainerConfig
from mtp_research.data.tokenizer import BOS_ID
from mtp_research.heads.stack import MTPHeads
from mtp_research.heads.weights import load_heads
from mtp_research.models.attention.attention import DenseContext
from mtp_research.models.fresh import new_target
from mtp_research.models.target import Target, load_target
from mtp_research.pretrain import pretrain
from mtp_research.pretrain.joint import joint_loss, new_modules
from mtp_research.pretrain.pretrain import pretrain_target
from mtp_research.runtime.errors import ConfigError, Interrupted
from mtp_research.training.loop import train_heads
from tests.pretrain.test_pretrain import (
    ARCHITECTURES,
    make_config,
    outcome,
    stop_after,
    write_corpus,
)
from tests.tiny import tiny_heads
from tests.training.walks import WalkedTexts, assert_walk_is_loop, greedy_records

ENGINE = EngineConfig(max_num_requests=8, max_model_len=96)
NUM_NEW = 30


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("joint") / "corpus")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No figures and samples of the finished target."""
    monkeypatch.setattr(pretrain, "evaluate_target", lambda *_, **__: {"dev": {}, "samples": []})


@pytest.fixture(scope="module")
def released(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of 80 steps with one module."""
    folder = tmp_path_factory.mktemp("released")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretrain, "evaluate_target", lambda *_, **__: {"dev": {}, "samples": []})
        config = make_config(corpus, num_mtp_modules=1, max_steps=80)
        pretrain_target(config, output_dir=folder, seed=0, report=lambda line: None)
    return folder / "target"


def prompts_of(target: Target) -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(6, target.config.vocab_size, (16, 6), generator=generator)
    return [tuple(row) for row in drawn.tolist()]


def walked(heads: MTPHeads) -> WalkedTexts:
    """Walk = loop, round for round, and the text is the target's."""
    prompts = prompts_of(heads.target)
    found = assert_walk_is_loop(
        heads, prompts, unroll="chain", num_depths=3, num_new=NUM_NEW, engine=ENGINE
    )
    plain = greedy_records(
        heads.target, None, prompts, num_drafts=0, num_new=NUM_NEW, engine=ENGINE
    )
    assert found.texts == [record.output_token_ids for record in plain]
    return found


def test_saved_target_is_a_release_of_its_family(released: Path) -> None:
    assert json.loads((released / "config.json").read_text())["num_nextn_predict_layers"] == 1
    tensors = load_file(released / "model.safetensors")
    own = {name for name in tensors if name.startswith("model.layers.2.")}
    assert {"model.layers.2.eh_proj.weight", "model.layers.2.mlp.experts.3.up_proj.weight"} < own
    embedding = tensors["model.embed_tokens.weight"]
    assert torch.equal(tensors["model.layers.2.embed_tokens.weight"], embedding)
    for name in own:
        is_bias = name.endswith("e_score_correction_bias")
        assert tensors[name].dtype == (torch.float32 if is_bias else torch.bfloat16), name


def test_modules_of_the_release_draft_and_are_tuned_further(released: Path, tmp_path: Path) -> None:
    target = load_target(released, dtype="float32", device="cpu")
    native = load_heads(released, target)
    before = walked(native)
    random = walked(tiny_heads(target, num_mtp_modules=1))
    assert before.num_accepted > 2 * random.num_accepted, "joint training taught the module"

    texts = [target.encode(f"Line {number} of a book.\n" * 4)[:60] for number in range(100, 120)]
    lines = [
        json.dumps({"id": str(i), "domain": "all", "token_ids": ids, "num_prompt_tokens": 6})
        for i, ids in enumerate(texts)
    ]
    (tmp_path / "answers.jsonl").write_text("\n".join(lines) + "\n")
    config = TrainConfig(
        model=ModelConfig("joint", "glm4_moe", str(released), device="cpu"),
        data=DataConfig(str(tmp_path / "answers.jsonl"), "original", 64, eval_documents=4),
        head=HeadConfig(num_mtp_modules=1),
        trainer=TrainerConfig(max_steps=6, batch_size=4, learning_rate=1e-3),
    )
    result = train_heads(config, tmp_path / "run")
    record = json.loads((tmp_path / "run" / "head" / "head.json").read_text())
    assert record["provenance"]["config"]["head"]["init"] == "native"
    started_from = record["provenance"]["started_from"]
    assert started_from == "native (1 module): the target's checkpoint holds MTP modules"
    assert result["acceptance_length_before"] > 1.1
    tuned = load_heads(tmp_path / "run" / "head", target)
    changed = {
        name: (tensor - native.state_dict()[name]).abs().max().item()
        for name, tensor in tuned.state_dict().items()
        if "correction_bias" not in name
    }
    assert min(changed.values()) > 0, "all weights of the module are trained"
    assert max(changed.values()) < 0.05, "from where the release left them"
    walked(tuned)


def test_joint_loss_is_the_sum_of_hand_made_terms() -> None:
    model = new_target(
        "glm4_moe",
        ARCHITECTURES["glm4_moe"] | {"vocab_size": 64},
        dtype=torch.float32,
        device=torch.device("cpu"),
        seed=0,
    )
    heads = new_modules(model, make_config(Path(), num_mtp_modules=2).pretrain, seed=1)
    assert heads is not None
    rows = torch.randint(6, 64, (2, 9), generator=torch.Generator().manual_seed(0))
    rows[0, 4] = BOS_ID  # no label
    loss = joint_loss(heads, rows, weight=0.5)
    loss.backward()
    assert all(p.grad is not None and p.grad.any() for p in heads.mtp_modules.parameters())
    gradient = model.model.layers[0].self_attn.q_proj.weight.grad.clone()

    inputs = rows[:, :-1]
    position_ids = torch.arange(8).expand(2, 8)
    previous = model.model(input_ids=inputs, use_cache=False).last_hidden_state
    terms = [previous]
    for depth in (1, 2):
        consumed = torch.zeros_like(inputs)
        consumed[:, : 8 - depth] = inputs[:, depth:]
        output = heads.run_module(
            heads.mtp_modules[depth - 1],
            token_ids=consumed,
            prev_hidden_states=terms[-1],
            position_ids=position_ids,
            context=DenseContext(torch.zeros_like(inputs)),
        )
        terms.append(output.post_norm)
    sums = []
    for depth, term in enumerate(terms):
        kept = [
            functional.log_softmax(model.lm_head(term[row, t]), dim=-1)[rows[row, t + depth + 1]]
            for row in range(2)
            for t in range(8 - depth)
            if rows[row, t + depth + 1] != BOS_ID
        ]
        sums.append(-torch.stack(kept).mean())
    torch.testing.assert_close(loss, sums[0] + 0.25 * (sums[1] + sums[2]))
    model.zero_grad()
    sums[0].backward()
    alone = model.model.layers[0].self_attn.q_proj.weight.grad
    assert not torch.allclose(gradient, alone, rtol=0.01), "the modules' loss reaches the target"


def test_stopped_joint_run_goes_on_bit_identical(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(corpus, num_mtp_modules=1, max_steps=6, log_every=2)

    def run(folder: Path) -> None:
        pretrain_target(config, output_dir=folder, seed=0, report=lambda line: None)

    run(tmp_path / "straight")
    stopped = tmp_path / "stopped"
    (stopped / "target").mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tmp_path / "straight" / "target" / name, stopped / "target" / name)
    with monkeypatch.context() as patch:
        stop_after(patch, 3)
        with pytest.raises(Interrupted):
            run(stopped)
    run(stopped)
    assert outcome(stopped) == outcome(tmp_path / "straight")


def test_weight_scales_the_modules_part_alone(corpus: Path, tmp_path: Path) -> None:
    losses = []
    for weight in (0.3, 0.6, 1e-9):
        folder = tmp_path / str(weight)
        config = make_config(
            corpus, num_mtp_modules=1, mtp_loss_weight=weight, max_steps=1, log_every=1
        )
        pretrain_target(config, output_dir=folder, seed=0, report=lambda line: None)
        losses.append(json.loads((folder / "pretrain_log.jsonl").read_text())["loss"])
    low, high, none = losses
    assert high - none == pytest.approx(2 * (low - none), rel=1e-3)
    assert low - none > 1, "a random module costs its weight times log V"


def test_names_that_hold_one_module_refuse_two_before_training(
    corpus: Path, tmp_path: Path
) -> None:
    config = make_config(corpus, "qwen3", num_mtp_modules=2)
    with pytest.raises(ConfigError, match=r"hold one MTP module, got 2"):
        pretrain_target(config, output_dir=tmp_path, seed=0, report=lambda line: None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_mtp_modules": 8, "seq_len": 8}, "must be below model.pretrain.seq_len=8, got 8"),
        ({"mtp_loss_weight": 0.5}, "must be 0.3 for model.pretrain.num_mtp_modules=0, got 0.5"),
    ],
)
def test_settings_that_mean_nothing_are_refused(changes: dict, message: str) -> None:
    model = make_config(Path(), **changes)
    config = TrainConfig(model=model, data=DataConfig("b"), task="target")
    with pytest.raises(ConfigError, match=message):
        validate(config)
