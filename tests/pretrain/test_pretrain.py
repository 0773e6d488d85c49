import json
import lzma
import os
import re
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from mtp_research.config.schema import ModelConfig
from mtp_research.config.training_schema import PretrainConfig
from mtp_research.models.fresh import new_target, next_token_logits, routers
from mtp_research.pretrain import pretrain
from mtp_research.pretrain.pretrain import pretrain_target
from mtp_research.pretrain.pretrain_report import ExpertBalancer
from mtp_research.pretrain.pretrain_state import Budget, Progress
from mtp_research.runtime.errors import ConfigError, IntegrityError, Interrupted, NumericFault

GLM4_MOE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "use_qk_norm": True,
    "num_nextn_predict_layers": 0,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}
QWEN3 = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
ARCHITECTURES = {"glm4_moe": GLM4_MOE, "qwen3": QWEN3}


def write_corpus(folder: Path) -> Path:
    folder.mkdir()
    for split, numbers in (("train", range(60)), ("dev", range(60, 66))):
        sums = [
            {
                "id": f"sum:{n}",
                "source": "test",
                "messages": [
                    {"role": "user", "content": f"What is {n} + 1?"},
                    {"role": "assistant", "content": f"{n} + 1 = {n + 1}"},
                ],
            }
            for n in numbers
        ]
        texts = [
            {"id": f"text:{n}", "source": "test", "text": f"Line {n} of a book.\n" * 9}
            for n in numbers
        ]
        for domain, records in (("arith", sums), ("prose", texts)):
            lines = "".join(f"{json.dumps(record)}\n" for record in records)
            path = folder / f"{domain}.{split}.jsonl.xz"
            path.write_bytes(lzma.compress(lines.encode()))
    return folder


def make_config(corpus: Path, family: str = "glm4_moe", **changes: object) -> ModelConfig:
    settings = {
        "vocab_size": 320,
        "seq_len": 32,
        "batch_size": 8,
        "max_steps": 24,
        "learning_rate": 1e-2,
        "warmup_steps": 3,
        "corpus_dir": str(corpus),
        "domain_weights": {"arith": 2.0, "prose": 1.0, "unused": 0.0},
        "log_every": 8,
    }
    return ModelConfig(
        name="test",
        family=family,
        path="unused",
        device="cpu",
        architecture=dict(ARCHITECTURES[family]),
        pretrain=PretrainConfig(**(settings | changes)),
    )


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("pretrain") / "corpus")


@pytest.fixture(scope="module")
def tokenizer_dir(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a trained tokenizer only, to be copied as an output folder."""
    folder = tmp_path_factory.mktemp("tokenizer")
    pretrain_target(
        make_config(corpus, max_steps=1),
        output_dir=folder / "full",
        seed=0,
        report=lambda line: None,
    )
    only = folder / "only"
    only.mkdir()
    (only / "target").mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / "full" / "target" / name, only / "target" / name)
    return only


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No figures and samples of the finished target."""
    monkeypatch.setattr(pretrain, "evaluate_target", lambda *_, **__: {"dev": {}, "samples": []})


@pytest.mark.parametrize("family", ["glm4_moe", "qwen3"])
def test_pretrain_lowers_the_loss_and_saves_a_loadable_folder(
    corpus: Path, tmp_path: Path, family: str
) -> None:
    lines: list[str] = []
    record = pretrain_target(
        make_config(corpus, family), output_dir=tmp_path, seed=0, report=lines.append
    )
    log = [json.loads(line) for line in (tmp_path / "pretrain_log.jsonl").read_text().splitlines()]
    losses = [entry["loss"] for entry in log]
    assert [entry["step"] for entry in log] == [8, 16, 24]
    assert losses[2] < losses[1] < losses[0]
    assert losses[2] < losses[0] - 0.8
    assert record == json.loads((tmp_path / "target" / "PROVENANCE.json").read_text())

    tensors = load_file(tmp_path / "target" / "model.safetensors")
    biases = [name for name in tensors if name.endswith("e_score_correction_bias")]
    assert all(torch.isfinite(tensor).all() for tensor in tensors.values())
    assert len(biases) == (1 if family == "glm4_moe" else 0)
    for name, tensor in tensors.items():
        assert tensor.dtype == (torch.float32 if name in biases else torch.bfloat16)

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "target")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "target", dtype=torch.float32)
    assert model.generation_config.eos_token_id == [1, 5]
    assert sorted(model.config.eos_token_id) == [1, 5]
    messages = [{"role": "user", "content": "What is 7 + 1?"}]
    inputs = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    output = model.generate(**inputs, max_new_tokens=4)
    assert output.shape[1] > inputs["input_ids"].shape[1]


def test_provenance_names_data_figures_and_versions(corpus: Path, tmp_path: Path) -> None:
    config = make_config(corpus, max_steps=2)
    record = pretrain_target(config, output_dir=tmp_path, seed=3, report=lambda line: None)
    assert sorted(record["data_sha256"]) == [
        f"{domain}.{split}.jsonl.xz" for domain in ("arith", "prose") for split in ("dev", "train")
    ]
    assert all(re.fullmatch(r"[0-9a-f]{64}", value) for value in record["data_sha256"].values())
    assert set(record["dev"]) == {"all", "arith", "prose"}
    assert 0 < record["dev"]["all"]["bits_per_byte"] < 16
    assert record["training"]["num_tokens"] == 2 * 8 * 32
    assert record["weights_bytes"] == (tmp_path / "target" / "model.safetensors").stat().st_size
    assert {"command", "versions", "git", "seed", "samples"} <= record.keys()
    assert len(record["samples"]) == 6


def test_reused_tokenizer_gives_the_same_weights_for_the_same_seed(
    corpus: Path, tokenizer_dir: Path, tmp_path: Path, quick: None
) -> None:
    weights = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        folder = tmp_path / name
        shutil.copytree(tokenizer_dir, folder)
        config = make_config(corpus, max_steps=3)
        pretrain_target(config, output_dir=folder, seed=seed, report=lambda line: None)
        weights.append((folder / "target" / "model.safetensors").read_bytes())
        reused = (folder / "target" / "tokenizer.json").read_bytes()
        assert reused == (tokenizer_dir / "target" / "tokenizer.json").read_bytes()
    assert weights[0] == weights[1]
    assert weights[0] != weights[2]


def test_time_limit_ends_the_run_at_the_smallest_rate(
    corpus: Path, tokenizer_dir: Path, tmp_path: Path, quick: None
) -> None:
    folder = tmp_path / "out"
    shutil.copytree(tokenizer_dir, folder)
    config = make_config(corpus, max_steps=10**9, max_seconds=1.0, log_every=1)
    record = pretrain_target(config, output_dir=folder, seed=0, report=lambda line: None)
    log = [json.loads(line) for line in (folder / "pretrain_log.jsonl").read_text().splitlines()]
    assert 1 < record["training"]["num_steps"] < 10**4
    assert record["training"]["seconds"] < 10.0
    assert log[-1]["learning_rate"] < 0.3 * max(entry["learning_rate"] for entry in log)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"corpus_dir": "/no/such/folder"}, "model.pretrain.corpus_dir"),
        ({"domain_weights": {}}, "model.pretrain.domain_weights"),
        ({"domain_weights": {"arith": -1.0}}, "model.pretrain.domain_weights"),
        ({"seq_len": 256}, "model.pretrain.seq_len"),
    ],
)
def test_wrong_settings_name_the_key(
    corpus: Path, tmp_path: Path, change: dict[str, object], words: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        pretrain_target(make_config(corpus, **change), output_dir=tmp_path, seed=0)


def test_unknown_family_names_the_key(corpus: Path, tokenizer_dir: Path) -> None:
    config = make_config(corpus)
    config.family = "no_such_family"
    with pytest.raises(ConfigError, match=r"model\.family"):
        pretrain_target(config, output_dir=tokenizer_dir, seed=0, report=lambda line: None)


def test_training_attention_equals_stock_attention() -> None:
    """Rows are causal and nothing but the attention implementation differs."""
    model = new_target(
        "glm4_moe",
        GLM4_MOE | {"vocab_size": 64},
        dtype=torch.float32,
        device=torch.device("cpu"),
        seed=0,
    ).eval()
    rows = torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        ours = next_token_logits(model, rows)
        model.set_attn_implementation("eager")
        model.set_experts_implementation("eager")
        torch.testing.assert_close(ours, next_token_logits(model, rows), atol=1e-5, rtol=1e-4)


def test_new_target_casts_parameters_and_keeps_buffers_in_fp32() -> None:
    model = new_target(
        "glm4_moe",
        GLM4_MOE | {"vocab_size": 64},
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
        seed=0,
    )
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert {buffer.dtype for buffer in model.buffers()} == {torch.float32}
    assert len(routers(model)) == 1
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_diverged_run_ends_with_a_numeric_fault(
    corpus: Path, tokenizer_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "out"
    shutil.copytree(tokenizer_dir, folder)

    def poisoned(model: torch.nn.Module, input_ids: torch.Tensor) -> torch.Tensor:
        return next_token_logits(model, input_ids) * torch.nan

    monkeypatch.setattr("mtp_research.pretrain.pretrain.next_token_logits", poisoned)
    with pytest.raises(NumericFault, match=r"model\.pretrain\.learning_rate"):
        pretrain_target(make_config(corpus), output_dir=folder, seed=0, report=lambda line: None)


def stop_after(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """SIGTERM to this process in a step."""
    update, calls = ExpertBalancer.update, [0]

    def wrapped(self: ExpertBalancer, *, scale: float) -> torch.Tensor | None:
        calls[0] += 1
        if calls[0] == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return update(self, scale=scale)

    monkeypatch.setattr(ExpertBalancer, "update", wrapped)


def outcome(folder: Path) -> tuple[bytes, list[dict[str, object]]]:
    """Weights, and the log without its clock."""
    lines = (folder / "pretrain_log.jsonl").read_text().splitlines()
    log = [json.loads(line) for line in lines]
    kept = [{k: v for k, v in e.items() if k not in ("tokens_per_s", "seconds")} for e in log]
    return (folder / "target" / "model.safetensors").read_bytes(), kept


def run_in(folder: Path, corpus: Path, *, seed: int = 0, **changes: object) -> dict[str, object]:
    # 11 lies between two lines of the log, whose mean loss covers both parts of the run.
    config = make_config(corpus, max_steps=20, **changes)
    return pretrain_target(config, output_dir=folder, seed=seed, report=lambda line: None)


@pytest.fixture
def stopped(
    corpus: Path, tokenizer_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """The folder of a run that SIGTERM stopped after step 11 of 20."""
    folder = tmp_path / "stopped"
    shutil.copytree(tokenizer_dir, folder)
    with monkeypatch.context() as patch:
        stop_after(patch, 11)
        with pytest.raises(Interrupted, match=r"SIGTERM after step 11 of .* output_dir=") as caught:
            run_in(folder, corpus)
    assert caught.value.exit_code == 75
    return folder


def test_stopped_run_goes_on_bit_identical(
    stopped: Path, corpus: Path, tokenizer_dir: Path, tmp_path: Path, quick: None
) -> None:
    assert (stopped / "latest").read_text() == "step_000011\n"
    assert not (stopped / "target" / "PROVENANCE.json").exists()
    straight = tmp_path / "straight"
    shutil.copytree(tokenizer_dir, straight)
    whole, resumed = run_in(straight, corpus), run_in(stopped, corpus)
    assert outcome(stopped) == outcome(straight)
    facts = [
        {k: v for k, v in record["training"].items() if k in ("num_steps", "num_tokens", "loss")}
        for record in (whole, resumed)
    ]
    assert facts[0] == facts[1]
    with pytest.raises(ConfigError, match="holds a finished target; set output_dir=FOLDER, or rem"):
        run_in(stopped, corpus, seed=3)
    assert outcome(stopped) == outcome(straight)
    assert not list(stopped.glob("step_*"))  # the target is written
    assert not (stopped / "latest").exists()


def test_stopped_run_with_other_settings_or_damage_is_refused(stopped: Path, corpus: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        run_in(stopped, corpus, seed=3, learning_rate=1e-3)
    assert "stopped after step 11, with other settings" in str(caught.value)
    assert "model.pretrain.learning_rate 0.01 -> 0.001; seed 0 -> 3;" in str(caught.value)
    path = stopped / "step_000011" / "routers.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(IntegrityError, match=r"no step folder can be used"):
        run_in(stopped, corpus)


def test_seconds_of_all_parts_of_a_run_count() -> None:
    limits = PretrainConfig(max_steps=10**9, max_seconds=100.0)
    budget = Budget(limits, done=Progress(step=5, spent_s=60.0, scheduled_s=50.0))
    assert budget.fraction(5) == pytest.approx(0.6, abs=0.01)
    budget.start()  # 10 s were spent before the schedule's clock started
    assert budget.fraction(6) == pytest.approx(50 / 90, abs=0.01)
    assert (budget.seconds, budget.scheduled_s) == pytest.approx((60, 50), abs=1)
