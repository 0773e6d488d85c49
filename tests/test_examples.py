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


def test_acceptance_by_context_covers_the_whole_text(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    main = load("acceptance_by_context").main
    main(["--tokens", "40"])
    assert {"32-63", "64-127"} <= set(rows_of(capsys.readouterr().out))
    text = tmp_path / "text.txt"
    text.write_text("The first words of a text, and then the ones behind them. " * 40)
    main(["--tokens", "16", "--text", str(text), "--longest", "256"])
    rows = rows_of(capsys.readouterr().out)
    assert list(rows) == ["64-127", "128-255", "256-511"]
    for num_requests, num_rounds, length, *_ in rows.values():
        assert int(num_requests) == 1
        assert 16 / float(length) <= int(num_rounds) + 1


def test_examples_stay_short() -> None:
    for path in set(EXAMPLES.glob("*.py")) - set(EXAMPLES.glob("serve*.py")):  # see test_serve
        lines = path.read_text(encoding="utf8").splitlines()
        code = [line for line in lines if line.strip() and not line.lstrip().startswith("#")]
        assert len(code) <= 45, f"{path.name} has {len(code)} lines of code; it is an example"
