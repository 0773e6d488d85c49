"""Readable Python files of the running interpreter, the corpus domain that needs no file.

Evaluation cuts its code prompts from the standard library too; the modules it may cut from are
listed here, so that no target is ever trained on them.
"""

import hashlib
import importlib.util
import re
import string
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from mtp_research.runtime.errors import ConfigError

PYTHON_PACKAGES = ("stdlib", "numpy", "triton", "torch", "transformers")
# Kept for evaluation by the corpus rules: code completion is measured on packages never trained on.
RESERVED_PACKAGES = ("jinja2", "mpmath", "networkx", "sympy")
# Standard-library files that no target is trained on: evaluation cuts its code prompts from them at
# run time. All of them exist as a single top-level file in Python 3.11, 3.12 and 3.13.
HELD_OUT_STDLIB = (
    "bisect.py",
    "calendar.py",
    "cmd.py",
    "codeop.py",
    "colorsys.py",
    "configparser.py",
    "contextlib.py",
    "copy.py",
    "csv.py",
    "difflib.py",
    "filecmp.py",
    "fnmatch.py",
    "fractions.py",
    "functools.py",
    "getopt.py",
    "glob.py",
    "graphlib.py",
    "heapq.py",
    "linecache.py",
    "mailbox.py",
    "netrc.py",
    "pprint.py",
    "queue.py",
    "random.py",
    "reprlib.py",
    "sched.py",
    "shelve.py",
    "shlex.py",
    "statistics.py",
    "string.py",
    "textwrap.py",
    "timeit.py",
)

MIN_SOURCE_BYTES = 400
MAX_SOURCE_BYTES = 200_000
_SKIPPED_FOLDERS = {
    "__pycache__", "dist-packages", "ensurepip", "idlelib", "lib2to3", "site-packages", "test",
    "testing", "tests", "turtledemo", *RESERVED_PACKAGES,
}  # fmt: skip
_GENERATED = re.compile(r"@generated|auto-?generated|automatically generated|do not edit", re.I)
# What readable code is mostly made of; tables of numbers or of escapes are not.
_CODE_BYTES = (string.ascii_letters + " \n_.,:=()[]\"'").encode()
_LICENCE_WORDS = ("copyright", "license", "licence")


class SourceFile(NamedTuple):
    """One file: `name` is PACKAGE/RELATIVE/PATH.py."""

    name: str
    text: str


def python_files(
    packages: Sequence[str], *, max_bytes: int, split: Literal["train", "dev"]
) -> list[SourceFile]:
    """Choose files of `packages`; see `mtp_research.data.sources.python_sources`."""
    readable = [_readable_files(package) for package in packages]
    readable.sort(key=lambda files: sum(len(file.text) for file in files))
    chosen: list[SourceFile] = []
    budget = max_bytes
    for index, files in enumerate(readable):
        share = budget // (len(readable) - index)
        for file in sorted(files, key=lambda file: _hash(file.name)):
            num_bytes = len(file.text.encode())
            if num_bytes <= share:
                share -= num_bytes
                budget -= num_bytes
                chosen.append(file)
    return [file for file in chosen if _is_dev(file.name) == (split == "dev")]


def _readable_files(package: str) -> list[SourceFile]:
    root = _package_root(package)
    files = []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if _is_wanted(relative) and path.stat().st_size <= MAX_SOURCE_BYTES:
            text = _clean(path)
            if text is not None:
                files.append(SourceFile(f"{package}/{relative.as_posix()}", text))
    return files


def _package_root(package: str) -> Path:
    if package in RESERVED_PACKAGES:
        raise ConfigError(f"{package} is reserved for evaluation; leave it out of the packages")
    if package == "stdlib":
        return Path(sysconfig.get_paths()["stdlib"])
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise ConfigError(f"package {package!r} is not installed; install it or leave it out")
    return Path(spec.origin).parent


def _is_wanted(relative: Path) -> bool:
    """Whether a file is neither a test nor held out; `relative` starts inside the package."""
    if _SKIPPED_FOLDERS & set(relative.parts) or re.match(r"test_|.*_test\.py$", relative.name):
        return False
    return relative.name not in HELD_OUT_STDLIB


def _clean(path: Path) -> str | None:
    """Text without its licence header; None for generated files and for data tables."""
    raw = path.read_bytes()
    try:
        text = raw.decode("utf8").replace("\r\n", "\n")
    except UnicodeDecodeError:
        return None
    num_odd = len(raw.translate(None, delete=_CODE_BYTES))
    if num_odd > 0.2 * len(raw) or _GENERATED.search(text[:2000]):
        return None
    header = re.match(r"(?:[ \t]*(?:#[^\n]*)?\n)*", text)
    if header and any(word in header.group().lower() for word in _LICENCE_WORDS):
        text = text[header.end() :]
    text = text.strip("\n") + "\n"
    return text if len(text) >= MIN_SOURCE_BYTES else None


def _is_dev(name: str) -> bool:
    return int(_hash(name)[:8], 16) % 64 == 0


def _hash(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()
