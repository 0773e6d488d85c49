"""The import that papers use, and that it stays free until a name is touched."""

import dataclasses
import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import get_type_hints

import pytest

import mtp_research
from mtp_research.runtime.errors import ConfigError

ROOT = Path(__file__).resolve().parent.parent
LAB_TINY = ROOT / "assets" / "lab_tiny"


def test_snippet_of_the_docstring_decodes_with_the_shipped_heads() -> None:
    from mtp_research import SpecDecoder, SpecSettings, load_heads, load_target

    target = load_target(LAB_TINY / "target", dtype="float32", device="cpu")
    heads = load_heads(LAB_TINY / "heads" / "chain_n3", target)
    decoder = SpecDecoder(
        target, heads, spec=SpecSettings(policy="training", num_speculative_tokens=3)
    )
    prompts = [[0, 3, 100, 101, 4], [0, 300, 301]]
    outputs = {output.request_id: output for output in decoder.generate(prompts, max_new_tokens=12)}
    assert set(outputs) == {"0", "1"}
    assert all(1 <= len(output.output_token_ids) <= 12 for output in outputs.values())
    assert 1.0 <= decoder.stats.acceptance_length <= 4.0


@pytest.mark.parametrize("name", mtp_research.__all__)
def test_every_public_name_exists(name: str) -> None:
    assert getattr(mtp_research, name) is not None
    assert name in dir(mtp_research)


def test_unknown_name_lists_the_public_ones() -> None:
    with pytest.raises(AttributeError, match="SpecDecoder, SpecSettings, evaluate, load_heads"):
        mtp_research.Decoder  # noqa: B018 - reading the attribute is the test


def test_package_imports_nothing_until_a_name_is_used() -> None:
    probe = (
        "import sys, mtp_research; sys.exit(' '.join({'torch', 'transformers'} & {*sys.modules}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.stderr.strip() == ""


def test_every_note_names_a_parameter_of_its_call() -> None:
    """Keys of the configuration as `ConfigError` says them in Python."""
    from mtp_research.config.schema import EvalConfig, VerifyOptions
    from mtp_research.decode.draft import draft_length

    calls = [getattr(mtp_research, name) for name in ("SamplingParams", "SpecSettings")]
    calls += [mtp_research.EngineConfig, mtp_research.load_target, VerifyOptions]
    calls += [draft_length.ConfidenceLength, draft_length.BatchTableLength]
    calls += [draft_length.ExpectedGainLength]
    parameters = {call.__name__: inspect.signature(call).parameters for call in calls}
    num_named = 0
    for section in ("engine", "model", "sampling", "spec"):
        for item in dataclasses.fields(get_type_hints(EvalConfig)[section]):
            key = f"{section}.{item.name}"
            for note in getattr(ConfigError(f"{key} is wrong."), "__notes__", []):
                if key == "spec.head":
                    continue
                found = re.fullmatch(rf"In Python: {key} is (\w+)\((\w+)=\.\.\.\)\.", note)
                assert found is not None, note
                assert found[2] in parameters[found[1]], note
                num_named += 1
    assert num_named > 60


def test_snippets_of_the_guide_decode(capsys: pytest.CaptureFixture[str]) -> None:
    """Those of "From Python" up to training, and the length rule that is written there."""
    guide = (ROOT / "docs" / "guide.md").read_text(encoding="utf8")
    blocks = re.findall(r"```python\n(.*?)```", guide[guide.index("## From Python") :], re.DOTALL)
    (rule,) = (block for block in blocks if "class Careful" in block)
    code = f"{blocks[0]}{blocks[1]}{rule}".replace("max_new_tokens=64", "max_new_tokens=8")
    names: dict[str, object] = {}
    exec(compile(code, "guide.md", "exec"), names)
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in shown[-2:]] == ["abort", "length"]
    assert "TokenLogprobs(" in shown[-1]
    list(names["decoder"].generate(["def add(a, b):\n"], max_new_tokens=8))
    assert names["decoder"].stats.records[-1].num_drafted_per_round[0] == 3
