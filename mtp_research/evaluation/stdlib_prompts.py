"""Code-completion prompts cut at run time from the running interpreter's standard library.

Nothing is shipped: each prompt is a function of a held-out module, broken off in the middle of its
body. The cut depends on the source text and the seed only, so one Python version always gives the
same prompts; another version may give others, which is why every prompt is recorded with its hash.
"""

import ast
import hashlib
import sysconfig
import textwrap
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

MIN_CHARACTERS = 300
MAX_CHARACTERS = 600
MIN_REMAINING_LINES = (
    2  # of the function after the cut, so that the model has something to complete
)


class CodeCut(NamedTuple):
    """One prompt: where it was cut (`bisect.py:insort_left:31`) and the text before the cut."""

    origin: str
    text: str


def cut_code(
    modules: Sequence[str], *, num_prompts: int, seed: int = 0, root: Path | None = None
) -> list[CodeCut]:
    """Cut function bodies, spread as evenly over the modules as they allow.

    Args:
        modules: file names relative to `root`; a missing file gives no prompts.
        num_prompts: most prompts to return; fewer when the modules do not hold as many.
        seed: selects the functions and the line of each cut.
        root: folder of the sources; None is the standard library.

    Returns:
        Texts of `MIN_CHARACTERS` to `MAX_CHARACTERS` characters: a dedented signature, its
        docstring if any and some lines of the body, up to a line end. Sorted by origin.
    """
    root = Path(sysconfig.get_paths()["stdlib"]) if root is None else root
    ranked = [_ranked_cuts(root / name, seed) for name in modules if (root / name).is_file()]
    rounds = zip_longest(*ranked)  # the best cut of every module, then the second best, ...
    cuts = [cut for one_round in rounds for cut in one_round if cut is not None]
    return sorted(cuts[:num_prompts])


def _ranked_cuts(path: Path, seed: int) -> list[CodeCut]:
    """At most one cut per function of the file, in a seeded order."""
    source = path.read_text(encoding="utf8")
    lines = source.splitlines()
    cuts = []
    for name, node in _functions(ast.parse(source).body):
        options = [
            CodeCut(f"{path.name}:{name}:{last}", text)
            for last in range(_body_line(node), (node.end_lineno or 0) - MIN_REMAINING_LINES + 1)
            if (text := _text_before(lines, node, last)) is not None
        ]
        if options:
            cuts.append(min(options, key=lambda cut: _rank(cut, seed)))
    return sorted(cuts, key=lambda cut: _rank(cut, seed))


def _functions(
    body: list[ast.stmt], prefix: str = ""
) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Qualified name and node of functions and methods; nested functions are skipped."""
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from _functions(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{prefix}{node.name}", node


def _body_line(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Earliest line (from 1) after which a cut may fall: end of docstring or first statement."""
    return node.body[0].end_lineno or node.body[0].lineno


def _text_before(
    lines: list[str], node: ast.FunctionDef | ast.AsyncFunctionDef, last: int
) -> str | None:
    """The function up to and including line `last` (from 1), None where that is no fair prompt."""
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    if not lines[last - 1].strip():
        return None  # a blank last line would leave the indentation of the next one open
    text = textwrap.dedent("\n".join(lines[first - 1 : last])) + "\n"
    # A string with text in column 0 defeats the dedent of a method.
    is_dedented = not text[0].isspace()
    return text if is_dedented and MIN_CHARACTERS <= len(text) <= MAX_CHARACTERS else None


def _rank(cut: CodeCut, seed: int) -> str:
    """A seeded order that does not depend on the random generator of a library version."""
    return hashlib.sha256(f"{seed}:{cut.origin}:{cut.text}".encode()).hexdigest()
