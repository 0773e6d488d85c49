"""The scripts under `examples/` run as they are and print what they promise."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rows_of(printed: str) -> dict[str, list[str]]:
    """Cells by the first word of a line, the heading left out."""
    return {line.split()[0]: line.split()[1:] for line in printed.splitlines()[1:]}


def test_new_policy_repairs_what_the_known_one_leaves(capsys: pytest.CaptureFixture[str]) -> None:
    load("new_policy").main()
    rows = rows_of(capsys.readouterr().out)
    assert int(rows["target_roll"][1]) > 0
    assert rows["anchored_roll"][1:4] == ["0", "0", "0"]
    assert float(rows["anchored_roll"][0]) >= 1


def test_new_verify_rule_accepts_more_and_says_that_it_is_lossy(
    capsys: pytest.CaptureFixture[str],
) -> None:
    load("new_verify_rule").main()
    rows = rows_of(capsys.readouterr().out)
    assert rows["greedy"][0] == "True"
    assert rows["greedy"][2:] == ["0", "of", "8"]
    assert rows["margin"][0] == "False"
    assert int(rows["margin"][2]) > 0
    assert float(rows["margin"][1]) > float(rows["greedy"][1])


def test_acceptance_by_context_covers_the_whole_text(capsys: pytest.CaptureFixture[str]) -> None:
    load("acceptance_by_context").main(num_tokens=100)
    rows = rows_of(capsys.readouterr().out)
    assert {"0-63", "64-127", "128-191"} <= set(rows)
    for num_rounds, length, *rates in rows.values():
        assert int(num_rounds) > 0
        assert float(length) == pytest.approx(1 + sum(map(float, rates)), abs=2e-3)


def test_examples_stay_short() -> None:
    for path in set(EXAMPLES.glob("*.py")) - set(EXAMPLES.glob("serve*.py")):  # see test_serve
        lines = path.read_text(encoding="utf8").splitlines()
        code = [line for line in lines if line.strip() and not line.lstrip().startswith("#")]
        assert len(code) <= 45, f"{path.name} has {len(code)} lines of code; it is an example"
