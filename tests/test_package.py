"""The wheel as a user gets it: built, unpacked elsewhere, and run with nothing of the repository.

And what pyproject.toml declares: every import, the extras, and the version.
"""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import mtp_research
from mtp_research.runtime import errors, provenance

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf8"))["project"]
BUILT_FROM = ("mtp_research", "kernels", "conf", "assets")
MAX_WHEEL_BYTES = 40_000_000
# A module -> the distribution that has it, where the names differ.
DISTRIBUTIONS = {"hydra": "hydra-core", "huggingface_hub": "huggingface-hub", "yaml": "pyyaml"}
# Compared with where it is installed; no part of the project runs it.
PEERS = {"liger_kernel"}
# What other systems lack is taken away behind libraries, which choose by the system's name:
# functions of `os`, and for our own modules `fcntl`.
OTHER_SYSTEM = """
import builtins, os, sys
import torch, transformers, safetensors.torch
from transformers import AutoModelForCausalLM, PreTrainedModel
for name in ("sched_getaffinity", "sysconf", "getloadavg"):
    delattr(os, name)
theirs = builtins.__import__
def ours(name, globals=None, *rest, **named):
    if name == "fcntl" and (globals or {}).get("__name__", "").startswith("mtp_research"):
        raise ModuleNotFoundError("No module named 'fcntl'")
    return theirs(name, globals, *rest, **named)
builtins.__import__ = ours
exec(os.environ["SNIPPET"], {"__name__": "__main__"})
assert not os.listdir()
print("evaluation")
from mtp_research.__main__ import evaluate
sys.exit(evaluate())
"""


def extra_of(requirements: list[str]) -> set[str]:
    return {re.split(r"[\s<>=!~;\[]", one)[0].lower() for one in requirements}


DECLARED = {"": extra_of(PROJECT["dependencies"])} | {
    name: extra_of(wanted) for name, wanted in PROJECT["optional-dependencies"].items()
}


def top_imports(*folders: str) -> set[str]:
    """First parts of all imports, those inside functions as well."""
    found = set()
    for path in (path for folder in folders for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module.split(".")[0])
    return found - set(sys.stdlib_module_names)


def distribution(module: str) -> str:
    return DISTRIBUTIONS.get(module, module)


def test_every_import_is_declared() -> None:
    user = set().union(*(DECLARED[name] for name in DECLARED if name not in ("dev", "docs")))
    imported = top_imports("mtp_research", "kernels") - {"mtp_research"} - PEERS
    assert {name for name in imported if distribution(name) not in user} == set()
    own = {"mtp_research", "tests", "tools", "examples", "train_bench"}
    imported = top_imports("tests", "tools", "examples") - own
    assert {name for name in imported if distribution(name) not in user | DECLARED["dev"]} == set()


def test_extra_that_a_message_names_brings_the_package() -> None:
    for module, extra in errors.EXTRAS.items():
        assert distribution(module) in DECLARED[extra], module
        assert distribution(module) not in DECLARED[""], f"{module} is always there"


def test_extra_all_brings_every_extra_of_a_user() -> None:
    (everything,) = PROJECT["optional-dependencies"]["all"]
    named = set(re.findall(r"\[(.*)\]", everything)[0].split(","))
    assert named == set(DECLARED) - {"", "all", "dev", "docs"}


def test_version_is_that_of_the_source_tree() -> None:
    assert mtp_research.__version__ == PROJECT["version"]


def test_citation_and_changelog_name_the_version() -> None:
    version = PROJECT["version"]
    cited = (ROOT / "CITATION.cff").read_text(encoding="utf8")
    assert f"\nversion: {version}\n" in cited
    newest = re.search(r"^## (.*)", (ROOT / "CHANGELOG.md").read_text(encoding="utf8"), re.M)
    assert newest is not None
    named = re.fullmatch(rf"{re.escape(version)} \((\d{{4}}-\d\d-\d\d)\)", newest[1])
    assert named is not None, f"expected a section {version} (DATE), got {newest[1]}"
    assert f"\ndate-released: {named[1]}\n" in cited


def test_package_that_is_missing_is_named_with_its_extra(tmp_path: Path) -> None:
    probe = (
        "import sys; sys.modules['hydra'] = None; sys.argv = ['mtp', 'train']\n"
        "from mtp_research.__main__ import main; sys.exit(main())"
    )
    done = python("-c", probe, site=ROOT, cwd=tmp_path)
    assert done.returncode == 4, done.stderr
    assert done.stderr == (
        "error: hydra must be installed for this, got none; pip install 'mtp-research[train]'.\n"
    )


def test_import_of_our_own_that_fails_is_no_missing_package() -> None:
    with pytest.raises(ModuleNotFoundError), errors.extras_needed():
        raise ModuleNotFoundError("no module", name="mtp_research.absent")


def python(
    *words: str, site: Path, cwd: Path, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run Python with `site` in front of everything that is installed."""
    env = os.environ | {"PYTHONPATH": str(site), "PYTHONDONTWRITEBYTECODE": "1"} | environment
    return subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, cwd=cwd, env=env, check=False
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of a copy of the tree: a build leaves folders behind."""
    tree = tmp_path_factory.mktemp("tree")
    for name in BUILT_FROM:
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    words = ("-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index")
    done = python(*words, "--wheel-dir", "out", ".", site=tree / "nothing", cwd=tree)
    assert done.returncode == 0, done.stderr[-2000:]
    (built,) = (tree / "out").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the wheel is unpacked, as pip does it."""
    folder = tmp_path_factory.mktemp("site-packages")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(folder)
    return folder


def files_below(folder: Path) -> set[str]:
    paths = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return {path.as_posix() for path in paths if "__pycache__" not in path.parts}


def test_wheel_holds_the_package_and_what_it_reads_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as file:
        names = set(file.namelist())
        (points,) = (name for name in names if name.endswith("entry_points.txt"))
        assert "mtp = mtp_research.__main__:main" in file.read(points).decode()
        (metadata,) = (name for name in names if name.endswith("METADATA"))
        assert "Project-URL: Repository, https://github.com/" in file.read(metadata).decode()
    wanted = {f"mtp_research/{name}" for name in files_below(ROOT / "mtp_research")}
    for folder in ("kernels", "conf", "assets"):
        wanted |= {f"mtp_research/{folder}/{name}" for name in files_below(ROOT / folder)}
    assert "mtp_research/py.typed" in wanted
    assert {name for name in names if ".dist-info/" not in name} == wanted
    assert wheel.stat().st_size < MAX_WHEEL_BYTES


def test_commands_of_the_wheel_print_their_help(site: Path, tmp_path: Path) -> None:
    done = python("-m", "mtp_research", "--help", site=site, cwd=tmp_path)
    names = re.findall(r"^  (\w+) ", done.stdout, flags=re.MULTILINE)
    assert {"train", "eval", "report", "tables", "doctor", "export"} <= set(names), done.stderr
    script = "import sys; sys.argv = ['/bin/mtp', 'eval', '--help']\n"
    script += "from mtp_research.__main__ import main; main()"
    done = python("-c", script, site=site, cwd=tmp_path)
    assert "usage: mtp eval [" in done.stdout, done.stderr
    assert "mtp eval spec.k=3" in done.stdout
    assert "eval.py" not in done.stdout.partition("groups (")[0]
    assert re.search(r"model=.*\| lab_tiny \|", done.stdout)


def test_doctor_of_the_wheel_knows_version_and_ranges(site: Path, tmp_path: Path) -> None:
    script = (
        "import mtp_research, mtp_research.app.doctor as doctor\n"
        "print(mtp_research.__file__, mtp_research.__version__, *doctor.CHECKS['versions']())"
    )
    done = python("-c", script, site=site, cwd=tmp_path)
    path, version, status, *detail = done.stdout.split(maxsplit=3)
    assert Path(path).is_relative_to(site), done.stderr
    assert (version, status) == (PROJECT["version"], "ok")
    assert "transformers" in detail[0]


def readme_snippet() -> str:
    """The code of README's section on a paper's code."""
    text = (ROOT / "README.md").read_text(encoding="utf8")
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0]


@pytest.mark.slow
def test_snippet_of_the_readme_and_an_evaluation_run_from_the_wheel_on_another_system(
    site: Path, tmp_path: Path
) -> None:
    """The snippet writes nothing; the evaluation finds conf and assets, and claims no commit."""
    git = ["git", "-C", str(site), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init"], ["commit", "--allow-empty", "-m", "theirs"]):  # somebody else's
        subprocess.run([*git, words[0], "--quiet", *words[1:]], check=True)
    words = ("prompts.max_prompts=1", "sampling.max_new_tokens=2", "spec.head=null", "spec.k=1")
    words = (*words, "output_dir=run")
    done = python("-c", OTHER_SYSTEM, *words, site=site, cwd=tmp_path, SNIPPET=readme_snippet())
    assert done.returncode == 0, done.stderr[-2000:]
    assert "WRONG" in done.stdout.partition("\nevaluation\n")[0].splitlines()[-1]
    run = json.loads((tmp_path / "run" / "run.json").read_text())
    assert run["git"] == {"sha": None, "dirty": None, "diff_sha256": run["git"]["diff_sha256"]}
    assert run["hardware"]["memory_bytes"] is None
    assert run["hardware"]["num_cores"] == (os.cpu_count() or 1)
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert Path(config["model"]["path"]).is_relative_to(site)


def test_shipped_root_holds_what_is_shipped() -> None:
    root = provenance.shipped_root()
    assert (root / "conf" / "eval.yaml").is_file()
    assert (root / "assets" / "lab_tiny" / "target" / "config.json").is_file()
