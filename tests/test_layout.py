"""Which file may import what, and that `kernels/` can never shadow Hugging Face's package.

Imports are read from the syntax tree, so that one inside a function counts as well.
"""

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# The area -> the areas it may import directly; what those may import is allowed too.
DIRECTIONS = {
    "kernels": set(),
    "hidden_policy": set(),
    "row_layout": set(),
    "policy": {"hidden_policy", "row_layout"},
    "data": set(),
    "models": {"kernels", "policy"},
    "heads": {"models"},
    "decode": {"heads", "models", "policy", "kernels"},
    "training": {"heads", "models", "policy", "data"},
    "evaluation": {"decode", "data"},
}
FOR_ALL = {
    "config",
    "config_choices",
    "errors",
    "files",
    "grid",
    "provenance",
    "run_lock",
    "validation",
}
OWN_NOTHING = {"kernels", "hidden_policy", "row_layout", "policy"}
# A heavy package -> the files and folders that may import it.
HOMES = {
    "transformers": ("mtp_research/models/", "mtp_research/heads/weights.py", "mtp_research/data/"),
    "wandb": ("mtp_research/training/tracking.py", "mtp_research/evaluation/wandb_tables.py"),
    "accelerate": ("mtp_research/training/",),
    "deepspeed": ("mtp_research/training/",),
    "hydra": ("mtp_research/cli.py",),
    "omegaconf": ("mtp_research/cli.py",),
    "xgrammar": ("mtp_research/decode/sampling/grammar.py",),
}
NOT_NEEDED_TO_DECODE = (
    "hydra",
    "omegaconf",
    "wandb",
    "deepspeed",
    "accelerate",
    "datasets",
    "xgrammar",
)
LIBRARY_PROBE = """
import importlib, sys
for name in {blocked!r}:
    sys.modules[name] = None
for name in {modules!r}:
    importlib.import_module(name)
# transformers looks for a package `kernels` and meets our folder as an empty namespace, which it
# rightly takes for absent. Anything with a file must be Hugging Face's.
shadow = sys.modules.get("kernels")
origin = None if shadow is None else shadow.__file__
assert origin is None or "site-packages" in origin, origin
from transformers.utils import import_utils
assert import_utils.is_kernels_available() == (origin is not None), origin
assert not [name for name in sys.modules if name.startswith("kernels.")] or origin
"""

SOURCES = sorted([*(ROOT / "mtp_research").rglob("*.py"), *(ROOT / "kernels").rglob("*.py")])
REUSED = [path for path in SOURCES if {"decode", "kernels", "evaluation"} & set(path.parts)]


def imported_modules(path: Path) -> Iterator[str]:
    """Names of all modules that a file imports, save those it needs only when run as a command."""
    tree = ast.parse(path.read_text(encoding="utf8"))
    tree.body = [node for node in tree.body if not is_main_block(node)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} imports relatively; write the full name"
            module = node.module or ""
            # `from mtp_research import policy` names a module in its list.
            own = module == "mtp_research"
            yield from (f"{module}.{alias.name}" for alias in node.names) if own else [module]


def is_main_block(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'"


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts[1:] if parts[0] == "mtp_research" else parts
    return ".".join(["mtp_research", *(part for part in parts if part != "__init__")])


def allowed_areas(area: str) -> set[str]:
    below = set(DIRECTIONS[area])
    for other in DIRECTIONS[area]:
        below |= allowed_areas(other)
    return below


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_imports_go_one_way(path: Path) -> None:
    area = [*module_name(path).split("."), ""][1]
    if area not in DIRECTIONS:
        return
    allowed = allowed_areas(area) | {area} | (set() if area in OWN_NOTHING else FOR_ALL)
    wrong = [
        name
        for name in imported_modules(path)
        if name.startswith("mtp_research.") and name.split(".")[1] not in allowed
    ]
    assert not wrong, f"{relative(path)} may import {sorted(allowed)}, imports {wrong}"


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_heavy_packages_stay_at_home(path: Path) -> None:
    name = relative(path)
    for package in {module.split(".")[0] for module in imported_modules(path)} & set(HOMES):
        assert name.startswith(HOMES[package]), f"{name} imports {package}, home {HOMES[package]}"


def test_decode_and_training_never_meet() -> None:
    assert "training" not in allowed_areas("decode") | allowed_areas("evaluation")
    assert "decode" not in allowed_areas("training")


def test_kernels_folder_is_no_top_level_package() -> None:
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_installed_kernels_package_wins_over_the_folder(tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("")
    probe = (
        f"import sys; sys.path.append({str(tmp_path)!r}); import kernels; print(kernels.__file__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert done.stdout.strip() == str(tmp_path / "kernels" / "__init__.py")


def test_nothing_imports_a_top_level_kernels() -> None:
    entries = [ROOT / "train.py", ROOT / "eval.py", *(ROOT / "tests").rglob("*.py")]
    for path in [*SOURCES, *entries]:
        tops = {name.split(".")[0] for name in imported_modules(path)}
        assert "kernels" not in tops, f"{relative(path)} must import mtp_research.kernels"


def test_reused_parts_import_without_the_training_stack() -> None:
    modules = [module_name(path) for path in REUSED if path.stem != "__main__"]
    probe = LIBRARY_PROBE.format(blocked=NOT_NEEDED_TO_DECODE, modules=["transformers", *modules])
    done = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_build_lists_every_package_folder() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf8"))
    listed = project["tool"]["setuptools"]
    folders = {module_name(path.parent) for path in SOURCES}
    assert set(listed["packages"]) >= folders
    assert listed["package-dir"] == {"mtp_research.kernels": "kernels"}


def test_lock_pins_every_requirement_without_a_local_build() -> None:
    lines = (ROOT / "requirements.lock").read_text(encoding="utf8").split()
    assert all(line.count("==") == 1 and "+" not in line for line in lines)
    names = {line.split("==")[0] for line in lines}
    assert {"torch", "triton", "transformers", "uv", "pytest"} <= names
    assert not {name for name in names if name.startswith("nvidia")}
