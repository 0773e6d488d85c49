"""The import that papers use, and that it stays free until a name is touched."""

import subprocess
import sys
from pathlib import Path

import pytest

import mtp_research

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
