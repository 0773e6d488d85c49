"""What a run was: command, code, versions, machine; written into each run folder without secrets.

Files: `config.json` (resolved configuration), `run.json` (`run_record`), `git.diff` (uncommitted
changes of tracked files). Only the standard library is imported, so `--help` stays instant.
"""

import dataclasses
import functools
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mtp_research.runtime.errors import ConfigError, EnvironmentFault, escaped

if TYPE_CHECKING:
    from packaging.specifiers import SpecifierSet

PROJECT = "mtp-research"
REPOSITORY_ROOT = Path(__file__).resolve().parents[2]  # of a source tree
_PROJECT_FILE = REPOSITORY_ROOT / "pyproject.toml"
PACKAGES = ("torch", "triton", "transformers", "tokenizers", "safetensors", "numpy",
            "accelerate", "deepspeed", "datasets", "hydra-core", "wandb")  # fmt: skip
RECORD_SCHEMA = 1
RUN_FILES = ("config.json", "run.json", "git.diff")
HIDDEN = "[redacted]"

_SECRET_WORD = (
    r"(?:api_?key|key|token|secret|(?:pg)?pass(?:word|wd|phrase)?|pwd|pat|credentials?"
    r"|authorization)"
)
# A name whose last word is a secret word: HF_TOKEN, api-key, but not max_new_tokens or top_k.
_SECRET_NAME = re.compile(rf"(?:^|[._-]){_SECRET_WORD}$", re.IGNORECASE)
_SECRET_OPTION = re.compile(rf"(\b(?:[\w.-]*[._-])?{_SECRET_WORD}=)\S+", re.IGNORECASE)
_URL_PASSWORD = re.compile(r"(://)[^/\s@]+@")
_KNOWN_TOKEN = re.compile(r"\b(?:hf_|sk-|ghp_|github_pat_)[A-Za-z0-9_-]{16,}")
_MIN_SECRET_LENGTH = 8  # shorter environment values would blank out ordinary words


class _Code(NamedTuple):
    """The code of this process: commit, whether it was changed since, and how."""

    sha: str | None
    is_dirty: bool | None
    diff: str


def shipped_root() -> Path:
    """The folder with `conf/` and `assets/`: the root of a source tree, the package in a wheel."""
    return REPOSITORY_ROOT if _is_source_tree() else Path(__file__).resolve().parents[1]


def _is_source_tree() -> bool:
    """Whether this runs from the repository, as an editable install does too."""
    return _PROJECT_FILE.is_file() and (REPOSITORY_ROOT / "conf").is_dir()


def resolve_path(path: str) -> str:
    """The path from the working directory, else from `shipped_root`, else unchanged."""
    shipped = shipped_root() / path
    if Path(path).exists() or not shipped.exists():
        return path
    return str(shipped.resolve())


def run_record() -> dict[str, object]:
    """Describe this process: command, git state, package versions, hardware, time. No secrets."""
    argv, code = redact_words(sys.argv), _code_state(REPOSITORY_ROOT)
    return {
        "schema": RECORD_SCHEMA,
        "argv": argv,
        "command": shlex.join(["python", *argv]),
        "working_dir": redact(str(Path.cwd())),
        "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "git": {
            "sha": code.sha,
            "dirty": code.is_dirty,
            "diff_sha256": hashlib.sha256(code.diff.encode()).hexdigest(),
        },
        "versions": {"python": platform.python_version()} | _package_versions(),
        "hardware": _hardware(),
    }


def write_run_folder(output_dir: Path, config: object) -> dict[str, object]:
    """Write configuration, run record, which is returned, and git diff; the folder may exist."""
    assert dataclasses.is_dataclass(config), f"config must be a dataclass, got {type(config)}"
    assert not isinstance(config, type), f"config must be an instance, got the class {config}"
    record = run_record()
    config_file, record_file, diff_file = (output_dir / name for name in RUN_FILES)
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        _write_json(config_file, dataclasses.asdict(config))
        _write_json(record_file, record)
        diff_file.write_text(
            _redact_values(_code_state(REPOSITORY_ROOT).diff, _secret_values()), encoding="utf8"
        )
    except OSError as fault:
        raise EnvironmentFault(
            f"output_dir must be a writable folder, got {output_dir} ({fault.strerror}); "
            "set output_dir=PATH."
        ) from fault
    return record


def is_first_rank() -> bool:
    """Whether this process says and writes what ranks of torchrun or accelerate do together."""
    return os.environ.get("RANK", "0") == "0"


def describe_run(config: object, output_dir: Path) -> None:
    """Write what a run is when it starts; ranks share the folder of the first."""
    if is_first_rank():
        write_run_folder(output_dir, config)


def check_kind(output_dir: Path, config: object) -> None:
    """Refuse a folder that holds the run of another entry, by the sections of its `config.json`."""
    try:
        stored = json.loads((output_dir / RUN_FILES[0]).read_text(encoding="utf8"))
        theirs = _kind(stored)
    except (OSError, ValueError, AttributeError):  # nothing there that says what it is
        return
    ours = _kind(vars(config))
    if theirs != ours:
        raise ConfigError(
            f"output_dir {str(output_dir)!r} holds a run of {theirs}, got {ours}; "
            "set output_dir=FOLDER."
        )


def _kind(config: Mapping[str, object]) -> str:
    """The entry of a configuration, and the task where tasks leave different results."""
    is_training = "trainer" in config
    return "train.py" if is_training else f"eval.py task={config.get('task', 'evaluate')}"


def write_error(text: str) -> None:
    """Print the lines of a failure on stderr, each as `error: ...`; the one place that does."""
    for line in redact(text).splitlines():
        sys.stderr.write(f"error: {escaped(line)}\n")


def redact(text: str) -> str:
    """Replace secrets in a command line or message, and all that `_redact_values` finds.

    Example:
        >>> redact("logger.api_key=abc spec.k=3")
        'logger.api_key=[redacted] spec.k=3'
    """
    return _redact(text, _secret_values())


def redact_words(words: Sequence[str]) -> list[str]:
    """`redact` the words of a command line; a word behind the name of a secret is one.

    Example:
        >>> redact_words(["eval.py", "--api-key", "abc", "spec.k=3"])
        ['eval.py', '--api-key', '[redacted]', 'spec.k=3']
    """
    return [
        HIDDEN if _SECRET_NAME.search(before) else redact(word)
        for before, word in zip(["", *words], words, strict=False)
    ]


def redact_tree(value: object, name: str = "") -> object:
    """A copy of nested mappings and lists without secrets, by key (`api_key`) or by content."""
    return _redact_tree(value, name, _secret_values())


def _redact_tree(value: object, name: str, secrets: Sequence[str]) -> object:
    if isinstance(value, dict):
        return {key: _redact_tree(item, str(key), secrets) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_redact_tree(item, name, secrets) for item in value]
    if value is not None and _SECRET_NAME.search(name):
        return HIDDEN
    return _redact(value, secrets) if isinstance(value, str) else value


def _redact(text: str, secrets: Sequence[str]) -> str:
    return _redact_values(_SECRET_OPTION.sub(rf"\g<1>{HIDDEN}", text), secrets)


def _redact_values(text: str, secrets: Sequence[str]) -> str:
    """Replace URL passwords, known token forms and these secrets."""
    text = _URL_PASSWORD.sub(rf"\g<1>{HIDDEN}@", text)
    text = _KNOWN_TOKEN.sub(HIDDEN, text)
    for secret in secrets:
        text = text.replace(secret, HIDDEN)
    return text


def _secret_values() -> list[str]:
    """Values of secret environment variables; looked up once for all leaves of a tree."""
    return [
        value
        for name, value in os.environ.items()
        if _SECRET_NAME.search(name)
        and name != "PWD"  # every shell's working folder, and part of most paths that we name
        and len(value) >= _MIN_SECRET_LENGTH
    ]


def _write_json(path: Path, value: object) -> None:
    text = json.dumps(redact_tree(value), indent=2)
    path.write_text(f"{text}\n", encoding="utf8")


def _git(*words: str) -> str | None:
    """Output of a git command in the repository, or None without git, repository or commit.

    What is installed may lie below the repository of somebody else, whose commit is not ours.
    """
    if not _is_source_tree():
        return None
    command = ["git", "-C", str(REPOSITORY_ROOT), *words]
    try:
        done = subprocess.run(command, capture_output=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode("utf8", errors="replace")


@functools.cache
def _code_state(root: Path) -> _Code:
    """State of the repository when first asked: what runs was imported then, whatever comes after.

    A matrix describes dozens of runs in a process, and each look takes four calls of git.
    """
    sha, status = _git("rev-parse", "HEAD"), _git("status", "--porcelain")
    return _Code(
        sha=sha.strip() if sha else None,
        is_dirty=bool(status) if status is not None else None,
        diff=_git("diff", "--no-ext-diff", "HEAD") or "",
    )


def package_version(name: str) -> str | None:
    """Version of an installed package."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def project_version() -> str:
    """Version of this project: of the source, which may be newer than what is installed."""
    return _project()["version"] if _is_source_tree() else metadata.version(PROJECT)


def _project() -> dict[str, Any]:  # Any: as tomllib returns it
    return tomllib.loads(_PROJECT_FILE.read_text(encoding="utf8"))["project"]


def package_ranges() -> "dict[str, SpecifierSet]":
    """Versions that decoding needs, by package: of the source, else of the installed project."""
    from packaging.requirements import Requirement

    wanted = _project()["dependencies"] if _is_source_tree() else metadata.requires(PROJECT) or []
    needed = map(Requirement, wanted)
    return {
        one.name: one.specifier
        for one in needed
        if one.marker is None or one.marker.evaluate({"extra": ""})
    }


def num_cores() -> int:
    """Processors that this process may use; all of them where the system does not say."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


@functools.cache  # reads the metadata of every package, which takes 20 ms
def _package_versions() -> dict[str, str]:
    found = {name: package_version(name) for name in PACKAGES}
    return {name: version for name, version in found.items() if version}


def _hardware() -> dict[str, object]:
    return {
        "cpu": _cpu_name(),
        "num_cores": num_cores(),
        "memory_bytes": _memory_bytes(),
        "gpus": _gpu_names(),
        "platform": platform.platform(),
    }


def _memory_bytes() -> int | None:
    """Memory of the machine; None where the system does not say (Windows)."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _gpu_names() -> list[str]:
    """Ask the driver instead of torch, which would take seconds to import."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, check=True, timeout=30, text=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.strip().splitlines()
