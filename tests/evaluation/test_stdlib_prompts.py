import ast
from pathlib import Path

import pytest

from mtp_research.data.sources import HELD_OUT_STDLIB
from mtp_research.evaluation.run.prompts import MAX_CHARACTERS, MIN_CHARACTERS, cut_code

BODY = "".join(f"        total_number_{i} = value + {i}\n" for i in range(20))
SOURCE = f'''import os


class Counter:
    """A class."""

    def count(self, value):
        """Count from the value."""
{BODY}        return value


def short(value):
    return value
'''


def test_standard_library_gives_enough_prompts_of_the_right_length():
    cuts = cut_code(HELD_OUT_STDLIB, num_prompts=28)
    assert len(cuts) == 28
    assert all(MIN_CHARACTERS <= len(cut.text) <= MAX_CHARACTERS for cut in cuts)
    assert len({cut.origin.partition(":")[0] for cut in cuts}) == 28


def test_cut_is_deterministic_and_seeded():
    first, again, other = (cut_code(HELD_OUT_STDLIB, num_prompts=10, seed=s) for s in (0, 0, 1))
    assert first == again
    assert first != other


@pytest.mark.parametrize("seed", range(5))
def test_cut_ends_inside_the_body_of_a_dedented_function(tmp_path: Path, seed: int):
    (tmp_path / "m.py").write_text(SOURCE, encoding="utf8")
    (cut,) = cut_code(["m.py"], num_prompts=5, seed=seed, root=tmp_path)
    assert cut.text.startswith('def count(self, value):\n    """Count from the value."""\n')
    assert cut.text.endswith("\n")
    assert "return value" not in cut.text
    ast.parse(cut.text)  # cut between two statements of this body
    last_line = int(cut.origin.rpartition(":")[2])
    assert SOURCE.splitlines()[last_line - 1].strip() == cut.text.splitlines()[-1].strip()


def test_cut_leaves_two_lines_to_complete(tmp_path: Path):
    """Cuts may fall after the docstring and after `first`, not after `second`."""
    docstring = "A long description. " * 15
    body = f'    """{docstring}"""\n    first = 1\n    second = 2\n    return first\n'
    (tmp_path / "m.py").write_text(f"def f():\n{body}", encoding="utf8")
    ends = {
        cut_code(["m.py"], num_prompts=1, seed=seed, root=tmp_path)[0].text.splitlines()[-1].strip()
        for seed in range(20)
    }
    assert ends == {f'"""{docstring}"""', "first = 1"}


def test_missing_module_gives_nothing(tmp_path: Path):
    assert cut_code(["absent.py"], num_prompts=5, root=tmp_path) == []
