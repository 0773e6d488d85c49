"""What a user can get wrong, through the real entries: exit code, one line, never a traceback."""

import errno
import hashlib
import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mtp_research.__main__ import run_evaluation, run_training
from mtp_research.app.cli import run_entry
from mtp_research.config.schema import EvalConfig, TrainConfig

ROOT = Path(__file__).resolve().parent.parent
LAB_TINY = ROOT / "assets" / "lab_tiny"
HEAD = LAB_TINY / "heads" / "chain_n3"
OWN = LAB_TINY / "target"  # given by its path, a model like any other
# Entries run where torch and transformers cannot be imported: what is refused there costs no more
# than Hydra's import, about a second on an idle machine. That is paid once: each command is a fork.
LIGHT = """
import json, os, runpy, sys
sys.modules["torch"] = sys.modules["transformers"] = None
root = sys.argv[1]
sys.path.insert(0, root)
import mtp_research.__main__
from mtp_research.app.cli import compose_config
from mtp_research.config.schema import EvalConfig, TrainConfig
for schema in (EvalConfig, TrainConfig):
    compose_config(schema, [])  # reads the schema and the grammar of overrides
for line in sys.stdin:
    folder, entry, words = json.loads(line)
    child = os.fork()
    if not child:
        os.chdir(folder)
        sys.argv = [entry, *words]
        runpy.run_path(f"{root}/{entry}", run_name="__main__")
        sys.exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os.write(1, f"exit {code}\\n".encode())
"""


class Refuser:
    """Runs entries without torch, one after the other, in forks of a process of its own."""

    def __init__(self, errors: Path) -> None:
        self.errors, self.cache = errors, errors.with_name("no-cache")
        self.process = subprocess.Popen(
            [sys.executable, "-c", LIGHT, str(ROOT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors.open("w"),
            text=True,
            env=os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(self.cache)},
        )

    def __call__(self, entry: str, *words: str, folder: Path) -> tuple[int, str]:
        """Exit code and standard error of an entry run from `folder`, which must stay empty."""
        before, start = sorted(folder.rglob("*")), self.errors.stat().st_size
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([str(folder), entry, words]) + "\n")
        self.process.stdin.flush()
        printed = self.process.stdout.readline()
        message = self.errors.read_text()[start:]
        assert printed.startswith("exit "), printed + message
        assert all(line.startswith("error: ") for line in message.splitlines()), message
        assert not self.cache.exists()
        assert sorted(folder.rglob("*")) == before, "a refused command must leave nothing behind"
        return int(printed.split()[1]), message


@pytest.fixture(scope="module")
def refuse_without_torch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Refuser]:
    refuser = Refuser(tmp_path_factory.mktemp("refused") / "errors")
    yield refuser
    refuser.process.communicate()


def evaluate(*words: str) -> int:
    """Run eval.py in this process with few tokens."""
    short = [
        "model=lab_tiny",
        "spec.k=0",
        "sampling.max_new_tokens=4",
        "model.dtype=float32",
        "model.device=cpu",
    ]
    return run_entry(EvalConfig, run_evaluation, argv=[*short, *words])


def write_prompts(path: Path, *texts: str) -> Path:
    rows = [{"question_id": f"q{i}", "turns": [text]} for i, text in enumerate(texts)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def copy_target(folder: Path, **config: object) -> Path:
    """The shipped target with other values in its config.json."""
    shutil.copytree(LAB_TINY / "target", folder)
    described = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(described))
    return folder


def copy_head(folder: Path, **target: object) -> Path:
    """The shipped head, said to be trained for another target."""
    shutil.copytree(HEAD, folder)
    record = json.loads((folder / "head.json").read_text())
    record["target"] |= target
    (folder / "head.json").write_text(json.dumps(record))
    return folder


@pytest.mark.parametrize(
    ("entry", "words", "code", "expected"),
    [
        ("eval.py", ["spec.polcy=eagle"], 2, "spec.polcy is not a key of eval.py; nearest: spec."),
        ("train.py", ["trainr.seed=1"], 2, "nearest: seed"),
        ("eval.py", ["modl=lab_tiny"], 2, "nearest: model"),
        ("train.py", ["head=chain_n33"], 2, "nearest: chain_n3"),
        ("eval.py", ["spec.k=three"], 2, "must be an integer in 0..64, got three"),
        ("eval.py", ["engine.max_num_requests=200"], 2, "set engine.max_num_batched_tokens=800."),
        (
            "eval.py",
            ["spec=greedy", "sampling.temperature=0.7"],
            2,
            "must be 0 for spec.verify=greedy",
        ),
        ("eval.py", ["model.path=absent/folder/x"], 2, "local folder or a hub id ORGANISATION"),
        ("train.py", ["model.path=/absent"], 2, "'/absent' does not exist (from /"),
        ("eval.py", ["model.path=org/absent"], 2, "is no local path (from /"),
        ("train.py", ["model.path=org/absent"], 2, "the hub is offline or out of reach"),
        ("eval.py", ["model.path=a b/c?"], 2, "is no local path"),
        ("eval.py", ["model=smollm2"], 2, "model.path must be a file that exists"),
        ("eval.py", [f"model.path={OWN}"], 2, f"spec.head={OWN} for modules that the model"),
        ("train.py", [f"model.path={OWN}"], 2, f"mtp regenerate --target {OWN} --source"),
        ("eval.py", ["spec.head=absent"], 2, "spec.head must be an existing path, got absent"),
        ("train.py", ["head.path=absent"], 2, "head.path must be an existing path, got absent"),
        ("train.py", ["data.path=absent"], 2, "data.path must be an existing file or folder"),
        ("eval.py", ["prompts.path=absent"], 2, "prompts.path must be an existing file or folder"),
        ("eval.py", ["spec.head=."], 2, "has no head.json; set spec.head=PATH."),
        ("train.py", ["head.path=."], 2, "has no head.json; set head.path=PATH."),
        (
            "eval.py",
            ["model.path=."],
            2,
            "must be a folder with a config.json, or a .gguf file, got '.'",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_wrong_argument_is_refused_before_torch_is_imported(
    entry: str,
    words: list[str],
    code: int,
    expected: str,
    tmp_path: Path,
    refuse_without_torch: Refuser,
) -> None:
    exit_code, message = refuse_without_torch(entry, *words, folder=tmp_path)
    assert exit_code == code
    assert expected in message


@pytest.mark.parametrize(("entry", "key"), [("eval.py", "spec.head"), ("train.py", "head.path")])
def test_folder_of_a_run_in_place_of_its_heads_is_named(
    entry: str, key: str, tmp_path: Path, refuse_without_torch: Refuser
) -> None:
    heads = copy_head(tmp_path / "run" / "head")
    (tmp_path / "run" / "config.json").write_text("{}")  # a run describes itself
    words = ["model=lab_tiny", f"{key}={tmp_path / 'run'}"]
    code, message = refuse_without_torch(entry, *words, folder=tmp_path)
    assert code == 2
    assert f"got that of a run, '{tmp_path / 'run'}'; set {key}={heads}." in message


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.parametrize("engine", ["h200", "h200_deterministic"])
def test_captured_engine_without_a_gpu_exits_4_before_a_model_is_loaded(
    engine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = copy_target(tmp_path / "target")
    (target / "model.safetensors").unlink()  # a loader would complain about this instead
    words = [f"engine={engine}", f"model.path={target}", f"output_dir={tmp_path / 'run'}"]
    assert evaluate(*words, "model.device=auto") == 4
    message = capsys.readouterr().err
    assert message.startswith("error: engine.cuda_graphs=true needs ")
    assert "a CUDA GPU that torch can use (none is visible); set engine=auto." in message
    assert message.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", "prompts.jsonl holds no prompts"),
        ('{"turns": ["a"]}\n\n{"turns": \n', "prompts.jsonl:3: expected one JSON object"),
        ('{"turns": ["a"]}\n{"turn": ["b"]}\n', "prompts.jsonl:2: expected `turns`"),
    ],
    ids=["empty", "invalid JSON", "no prompt"],
)
def test_bad_prompt_file_exits_3_and_names_the_line(
    content: str, expected: str, tmp_path: Path, refuse_without_torch: Refuser
) -> None:
    (tmp_path / "prompts.jsonl").write_text(content)
    code, message = refuse_without_torch("eval.py", "prompts.path=prompts.jsonl", folder=tmp_path)
    assert code == 3
    assert expected in message


@pytest.mark.parametrize(("entry", "key"), [("eval.py", "spec.head"), ("train.py", "head.path")])
@pytest.mark.parametrize(
    ("name", "theirs", "ours"), [("hidden_size", 128, 256), ("vocab_size", 32000, 4096)]
)
def test_head_of_another_size_exits_2_with_both_values(
    entry: str,
    key: str,
    name: str,
    theirs: int,
    ours: int,
    tmp_path: Path,
    refuse_without_torch: Refuser,
) -> None:
    copy_head(tmp_path / "head", **{name: theirs})
    code, message = refuse_without_torch(entry, "model=lab_tiny", f"{key}=head", folder=tmp_path)
    assert code == 2
    assert f"{name} {theirs} (this target: {ours})" in message


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ('{"format": 1,\n', "head.json, line 2: invalid JSON"),
        ('{"format": 7}', "head format must be 1, got 7"),
        ('{"format": 1, "spec": {}}', "lacks ['target']"),
    ],
    ids=["invalid JSON", "other format", "no target"],
)
def test_damaged_head_record_exits_3(
    content: str, expected: str, tmp_path: Path, refuse_without_torch: Refuser
) -> None:
    copy_head(tmp_path / "head")
    (tmp_path / "head" / "head.json").write_text(content)
    code, message = refuse_without_torch("eval.py", "spec.head=head", folder=tmp_path)
    assert code == 3
    assert expected in message


def test_full_disk_in_training_is_one_line_and_exit_4(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    head = tmp_path / "head" / "model.safetensors"
    words = ["model=lab_tiny", "head.num_mtp_modules=1", "data.seq_len=32", "data.max_documents=40"]
    words += ["trainer.max_steps=1", "trainer.batch_size=1", "data.eval_documents=4"]
    argv = [*words, "model.device=cpu", f"output_dir={tmp_path}"]
    room = (HEAD.with_name("chain_n1") / "model.safetensors").stat().st_size * 3  # bfloat16 there
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
    try:
        assert run_entry(TrainConfig, run_training, argv=argv) == 4
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    message = capsys.readouterr().err.splitlines()[-1]
    assert message.startswith("error: output_dir must have room, got ")
    assert head.is_file()  # it fits, the optimizer's moments do not
    assert not [path for path in tmp_path.iterdir() if path.name.startswith((".writing", "step"))]
    state = tmp_path / "step_000001" / "state.json"
    assert run_entry(TrainConfig, run_training, argv=argv) == 0
    content = json.loads(state.read_text())
    del content["skips"]
    rewrite_step(state, json.dumps(content))
    assert run_entry(TrainConfig, run_training, argv=argv) == 3
    assert f"error: {state} must hold settings, skips" in capsys.readouterr().err


def rewrite_step(path: Path, content: str) -> None:
    """Replace a file of a step folder, with valid hashes, as another version would."""
    path.write_text(content)
    manifest = path.with_name("manifest.json")
    body = json.loads(manifest.read_text())["manifest"]
    digest = hashlib.sha256(content.encode()).hexdigest()
    body["files"][path.name] = {"bytes": len(content), "sha256": digest}
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    manifest.write_text(json.dumps({"manifest": body, "sha256": digest}))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EFBIG, errno.EDQUOT])
def test_full_disk_in_evaluation_is_one_line_and_exit_4(
    number: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(config: EvalConfig, folder: Path) -> None:
        raise OSError(number, os.strerror(number), str(folder / "results.json"))

    argv = [f"output_dir={tmp_path / 'r'}"]
    assert run_entry(EvalConfig, fail, argv=argv) == 4
    (message,) = capsys.readouterr().err.splitlines()
    assert message.startswith(f"error: output_dir must have room, got [Errno {number}] ")


def test_a_head_is_not_looked_at_when_nothing_is_drafted(tmp_path: Path) -> None:
    argv = ["spec.k=0", f"spec.head={tmp_path / 'absent'}", f"output_dir={tmp_path / 'run'}"]
    assert run_entry(EvalConfig, lambda config, output_dir: None, argv=argv) == 0


def test_training_a_target_needs_no_model_path(tmp_path: Path) -> None:
    reached = []
    argv = ["task=target", "model.path=absent/folder/x", f"output_dir={tmp_path / 'run'}"]
    assert run_entry(TrainConfig, lambda config, output_dir: reached.append(1), argv=argv) == 0
    assert reached


def test_only_prompts_beyond_the_context_exit_3(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", "word " * 40, "word " * 50)
    words = [f"prompts.path={prompts}", "engine.max_model_len=16", f"output_dir={tmp_path / 'r'}"]
    assert evaluate(*words) == 3
    message = capsys.readouterr().err
    assert message.startswith("error: all 2 prompts have 16 tokens or more")
    assert message.count("\n") == 1


def test_some_prompts_beyond_the_context_are_counted_as_skipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", "How are you?", "word " * 40)
    words = [f"prompts.path={prompts}", "engine.max_model_len=32", f"output_dir={tmp_path / 'r'}"]
    assert evaluate(*words) == 0
    printed = capsys.readouterr().out
    assert "skipped: 1 of 2 prompts leave no room in the context" in printed
    assert json.loads(printed.splitlines()[-1])["num_skipped_prompts"] == 1
    stored = json.loads((tmp_path / "r" / "results.json").read_text())
    assert stored["skipped_prompts"] == ["q1"]
    lengths = [
        r["num_prompt_tokens"] + len(r["output_token_ids"])
        for c in stored["conditions"]
        for r in c["records"]
    ]
    assert lengths
    assert max(lengths) <= 32


def test_triton_kernels_on_a_cpu_exit_4(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert evaluate("engine.backend=triton", f"output_dir={tmp_path / 'r'}") == 4
    assert "needs a CUDA GPU, the target is on cpu" in capsys.readouterr().err


def test_pool_too_small_for_a_request_exits_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate("engine.num_blocks=1", f"output_dir={tmp_path / 'r'}") == 2
    assert "can never fit: it needs" in capsys.readouterr().err


def test_context_beyond_the_target_s_own_exits_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate("engine.max_model_len=4096", f"output_dir={tmp_path / 'r'}") == 2
    assert "must be at most 2048, the target's max_position_embeddings" in capsys.readouterr().err


def test_target_without_a_finite_output_exits_3_and_keeps_the_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copy_target(tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"].fill_(torch.nan)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    prompts = write_prompts(tmp_path / "p.jsonl", "How are you?")
    words = [f"model.path={folder}", f"prompts.path={prompts}", f"output_dir={tmp_path / 'r'}"]
    assert evaluate(*words) == 3
    captured = capsys.readouterr()
    assert "got none for baseline (ended by non_finite)" in captured.err
    assert "no generation finished" in captured.out
    assert (tmp_path / "r" / "results.json").is_file()


@pytest.mark.parametrize(
    ("damage", "code", "expected"),
    [
        ("cut off", 3, "must be a whole Hugging Face model"),
        ("tensor missing", 3, "1 are missing ['model.norm.weight'], 0 of another shape"),
        ("tensor misshaped", 3, "1 of another shape ['model.norm.weight']"),
        ("no weights", 3, "must hold weights as .safetensors, got none"),
        ("other family", 2, "got model_type 'olmo2'"),
        ("unknown family", 2, "got model_type 'no_such_family'"),
        ("invalid config", 3, "config.json must be a model's configuration in JSON"),
    ],
)
def test_unusable_target_gives_one_line(
    damage: str, code: int, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copy_target(tmp_path / "model")
    damage_target(folder, damage)
    words = [f"model.path={folder}", "spec.k=1", f"output_dir={tmp_path / 'r'}"]
    assert evaluate(*words) == code
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    assert expected in message
    assert message.count("\n") == 1


def damage_target(folder: Path, damage: str) -> None:
    weights, config = folder / "model.safetensors", folder / "config.json"
    if damage == "cut off":
        weights.write_bytes(weights.read_bytes()[:5000])
    elif damage == "no weights":
        weights.unlink()
    elif damage == "invalid config":
        config.write_text("{")
    elif damage in ("other family", "unknown family"):
        kind = "olmo2" if damage == "other family" else "no_such_family"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"model_type": kind}))
    else:
        tensors = load_file(weights)
        norm = tensors.pop("model.norm.weight")
        if damage == "tensor misshaped":
            tensors["model.norm.weight"] = norm[:100].clone()
        save_file(tensors, weights, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("content", "code", "expected"),
    [
        ('{"id": "a", "text": "x"}\n{"id": \n', 3, ":2: "),
        ("", 3, "data.jsonl"),
        ('{"id": "a", "text": "x"}\n', 2, "data.eval_documents"),
    ],
    ids=["invalid JSON", "empty", "too few"],
)
def test_bad_training_data_gives_one_line(
    content: str, code: int, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "data.jsonl").write_text(content)
    words = [f"data.path={tmp_path / 'data.jsonl'}", f"output_dir={tmp_path / 'r'}"]
    argv = ["model=lab_tiny", "model.device=cpu", *words]
    assert run_entry(TrainConfig, run_training, argv=argv) == code
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    assert expected in message
    assert "Traceback" not in message
