"""Which file may import what, and that `kernels/` can never shadow Hugging Face's package.

Imports are read from the syntax tree, so that one inside a function counts as well.
"""

import ast
import functools
import inspect
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# Rooms from the ground floor up. A file may import its own room and rooms of lower floors; rooms of
# one floor never meet.
FLOORS = (
    {"runtime"},
    {"policy", "data", "kernels"},
    {"config"},
    {"models"},
    {"heads"},
    {"decode", "training"},
    {"evaluation", "pretrain"},
    {"bench"},
    {"studies"},
    {"app"},
    {"mtp_research"},  # the package's own two files: public names and the command
)
MOST_FILES_A_FOLDER = 15
MOST_MODULES = 229  # 162 when the house was built; features that came later took the rest
MOST_ARGUMENTS = 8
# A heavy package -> the files and folders that may import it.
HOMES = {
    "transformers": (
        "mtp_research/models/",
        "mtp_research/heads/weights.py",
        "mtp_research/data/",
        "mtp_research/bench/shapes.py",
        "mtp_research/evaluation/backends/transformers_backend.py",
    ),
    "wandb": (
        "mtp_research/runtime/wandb_run.py",
        "mtp_research/training/tracking.py",
        "mtp_research/evaluation/report/wandb_log.py",
    ),
    "pandas": ("mtp_research/evaluation/report/", "mtp_research/studies/"),
    "matplotlib": ("mtp_research/evaluation/report/", "mtp_research/studies/"),
    "accelerate": ("mtp_research/training/",),
    "deepspeed": ("mtp_research/training/",),
    "hydra": ("mtp_research/app/",),
    "omegaconf": ("mtp_research/app/",),
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
    "pandas",
    "matplotlib",
)
LIBRARY_PROBE = """
import importlib, sys
from pathlib import Path
for name in {blocked!r}:
    sys.modules[name] = None
import mtp_research.decode.decoder
own = [module for name, module in sys.modules.items() if name.split(".")[0] == "mtp_research"]
files = [Path(module.__file__) for module in own if getattr(module, "__file__", None)]
print(*sorted(str(file) for file in files if file.stat().st_size))
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
SCRIPTS = sorted(
    [*ROOT.glob("*.py"), *(ROOT / "tools").glob("*.py"), *(ROOT / "examples").glob("*.py")]
)
# What evaluates; pages and charts are the extra `report`.
REUSED = [
    path
    for path in SOURCES
    if {"decode", "kernels", "run", "stats", "backends"} & set(path.parts)
    and "runtime" not in path.parts
]


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts[1:] if parts[0] == "mtp_research" else parts
    return ".".join(["mtp_research", *(part for part in parts if part != "__init__")])


MODULES = {module_name(path): path for path in SOURCES}


@functools.cache
def imported_modules(path: Path) -> tuple[str, ...]:
    """Names of all modules that a file imports, inside functions and for types as well."""
    return tuple(_imports_of(path))


def _imports_of(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} imports relatively; write the full name"
            module = node.module or ""
            for alias in node.names:  # `from mtp_research.decode import step` names a module
                full = f"{module}.{alias.name}"
                yield full if full in MODULES else module


def room_of(module: str) -> str:
    return [*module.split("."), "mtp_research"][1] if "." in module else module


def floor_of(module: str) -> int:
    room = room_of(module)
    if module == "mtp_research.__main__":
        room = "mtp_research"
    return next(floor for floor, rooms in enumerate(FLOORS) if room in rooms)


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def is_empty(path: Path) -> bool:
    return path.name == "__init__.py" and not path.read_text(encoding="utf8").strip()


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules that import each other, by Tarjan's algorithm."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in graph[name]:
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            group = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(group) > 1:
                found.append(sorted(group))

    for name in graph:
        if name not in index:
            visit(name)
    return found


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_imports_go_down(path: Path) -> None:
    module = module_name(path)
    own = [name for name in imported_modules(path) if name.startswith("mtp_research.")]
    wrong = [
        name
        for name in own
        if room_of(name) != room_of(module) and floor_of(name) >= floor_of(module)
    ]
    assert not wrong, f"{relative(path)} imports upwards or sideways: {wrong}"


def test_no_two_modules_import_each_other() -> None:
    graph = {
        name: {other for other in imported_modules(path) if other in MODULES and other != name}
        for name, path in MODULES.items()
    }
    assert circles(graph) == []
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]


def test_folders_are_small_and_names_are_unique() -> None:
    names: dict[str, list[str]] = {}
    folders: dict[Path, int] = {}
    for path in [*SOURCES, *SCRIPTS]:
        folders[path.parent] = folders.get(path.parent, 0) + 1
        if path.name not in ("__init__.py", "__main__.py"):
            names.setdefault(path.name, []).append(relative(path))
    assert {name: where for name, where in names.items() if len(where) > 1} == {}
    full = {relative(folder): n for folder, n in folders.items() if n > MOST_FILES_A_FOLDER}
    assert full == {}
    assert len([path for path in SOURCES if not is_empty(path)]) <= MOST_MODULES
    root = {path.name for path in (ROOT / "mtp_research").iterdir() if path.is_file()}
    assert root <= {"__init__.py", "__main__.py", "py.typed"}


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_heavy_packages_stay_at_home(path: Path) -> None:
    name = relative(path)
    for package in {module.split(".")[0] for module in imported_modules(path)} & set(HOMES):
        assert name.startswith(HOMES[package]), f"{name} imports {package}, home {HOMES[package]}"


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
    for path in [*SOURCES, *SCRIPTS, *(ROOT / "tests").rglob("*.py")]:
        tops = {name.split(".")[0] for name in imported_modules(path)}
        assert "kernels" not in tops, f"{relative(path)} must import mtp_research.kernels"


def test_decode_loop_loads_few_modules_and_no_reused_part_the_training_stack() -> None:
    modules = [module_name(path) for path in REUSED if path.stem != "__main__"]
    probe = LIBRARY_PROBE.format(blocked=NOT_NEEDED_TO_DECODE, modules=["transformers", *modules])
    done = subprocess.run(  # one process: what it imports takes seconds
        [sys.executable, "-c", probe], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    files = done.stdout.splitlines()[0].split()
    assert 30 < len(files) <= MAX_LOADED, f"{len(files)} modules: {files}"


def test_build_lists_every_package_folder() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf8"))
    listed = project["tool"]["setuptools"]
    folders = {module_name(path.parent) for path in SOURCES}
    mapped = {f"mtp_research.{name}": name for name in ("assets", "conf", "kernels")}
    assert set(listed["packages"]) == folders | set(mapped)
    assert listed["package-dir"] == mapped


def test_lock_pins_every_requirement_without_a_local_build() -> None:
    lines = (ROOT / "requirements.lock").read_text(encoding="utf8").split()
    assert all(line.count("==") == 1 and "+" not in line for line in lines)
    names = {line.split("==")[0] for line in lines}
    assert {"torch", "triton", "transformers", "uv", "pytest"} <= names
    assert not {name for name in names if name.startswith("nvidia")}


# Who holds K: the settings of a decoder, what it drafts, and a column of an evaluation.
OWNERS_OF_K = {"SpecSettings", "DraftPlan", "Condition"}
SCHEMA_OR_RESULT = {
    "SpecConfig",
    "GridConfig",
    "ConditionResult",
    "ConditionSummary",
    "FaultCondition",
    "MatrixCell",
    "Setting",
}
MAX_LOADED = 82
MAX_ARGUMENTS = 8
CALLED_BY_LIBRARIES = {"attention_forward"}  # transformers calls it with all of its own
INTERNALS = {"scheduler", "graphs", "device_step", "cache", "drafter", "slot_state", "recent"}


def nodes_of(folder: str, kind: type[ast.AST]) -> Iterator[tuple[Path, ast.AST]]:
    for path in sorted((ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf8"))):
            if isinstance(node, kind):
                yield path, node


def stores_k(owner: ast.ClassDef) -> bool:
    """Whether a class has K as a field, or puts it on itself."""
    for node in ast.walk(owner):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AnnAssign):
            targets = [node.target]
        for target in targets:
            for part in ast.walk(target):
                name = getattr(part, "attr", getattr(part, "id", ""))
                is_own = isinstance(part, ast.Attribute) or part in [
                    item.target for item in owner.body if isinstance(item, ast.AnnAssign)
                ]
                if is_own and name.lstrip("_") == "num_speculative_tokens":
                    return True
    return False


def num_arguments(function: ast.FunctionDef) -> int:
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return len([one for one in named if one.arg not in ("self", "cls")])


def is_registered_op(function: ast.FunctionDef) -> bool:
    decorators = " ".join(ast.unparse(one) for one in function.decorator_list)
    return "custom_op" in decorators or "register_fake" in decorators


def test_few_classes_hold_the_number_of_drafts() -> None:
    owners = {
        node.name
        for _, node in nodes_of("mtp_research", ast.ClassDef)
        if isinstance(node, ast.ClassDef) and stores_k(node)
    }
    assert owners - SCHEMA_OR_RESULT <= OWNERS_OF_K, f"K is held by {sorted(owners)}"


def test_functions_take_few_arguments() -> None:
    long = [
        f"{relative(path)}:{node.lineno} {node.name} {num_arguments(node)}"
        for path, node in nodes_of("mtp_research", ast.FunctionDef)
        if isinstance(node, ast.FunctionDef)
        and num_arguments(node) > MAX_ARGUMENTS
        and not is_registered_op(node)
        and node.name not in CALLED_BY_LIBRARIES
    ]
    assert not long, f"more than {MAX_ARGUMENTS} arguments: {long}"


def test_decoder_takes_four_arguments() -> None:
    from mtp_research.decode.decoder import SpecDecoder

    names = [*inspect.signature(SpecDecoder).parameters]
    assert names == ["target", "heads", "spec", "engine"]


@pytest.mark.parametrize("folder", ["mtp_research", "tools", "examples"])
def test_nobody_reaches_into_a_decoder(folder: str) -> None:
    reaches = [
        f"{relative(path)}:{node.lineno} {ast.unparse(node)}"
        for path, node in nodes_of(folder, ast.Attribute)
        if isinstance(node, ast.Attribute)
        and node.attr in INTERNALS
        and ast.unparse(node.value).split(".")[-1].lstrip("_").endswith("decoder")
    ]
    assert not reaches, f"use the decoder's own methods: {reaches}"
