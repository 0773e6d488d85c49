"""The lossless verdict of a whole evaluation when one token of one text is changed."""

import dataclasses
from pathlib import Path

import pytest

from mtp_research.app.cli import compose_config
from mtp_research.config.schema import EvalConfig
from mtp_research.evaluation.backends import own_backend
from mtp_research.evaluation.report.stored import recompute
from mtp_research.evaluation.run.evaluate import evaluate
from mtp_research.evaluation.run.timed_decode import Decoded

WORDS = [
    "model=lab_tiny",
    "model.dtype=float32",
    "model.device=cpu",
    "prompts.max_prompts=3",
    "sampling.max_new_tokens=6",
    "sampling.ignore_eos=true",
    "engine.max_model_len=512",
    "spec.k=2",
]
SAME = "identical 3/3"


@pytest.mark.parametrize(
    ("changed", "verdicts"),
    [
        # condition -> index of the text and of the token in it
        ({"eagle": (0, 0), "training": (2, 5)}, ("DIFFERS, same 2/3", "DIFFERS, same 2/3")),
        ({"training": (1, 3)}, (SAME, "DIFFERS, same 2/3")),
        ({"baseline": (1, 5)}, ("DIFFERS, same 2/3", "DIFFERS, same 2/3")),
    ],
)
def test_one_changed_token_of_one_text_is_counted(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changed: dict[str, tuple[int, int]],
    verdicts: tuple[str, str],
) -> None:
    decode = own_backend.decode_prompts

    def decode_and_change(*args, **kwargs) -> Decoded:
        decoded = decode(*args, **kwargs)
        label = kwargs["finished"]._label
        if label not in changed:
            return decoded
        text, token = changed[label]
        records = list(decoded.records)
        token_ids = list(records[text].output_token_ids)
        token_ids[token] += 1
        records[text] = dataclasses.replace(records[text], output_token_ids=tuple(token_ids))
        return decoded._replace(records=tuple(records))

    monkeypatch.setattr(own_backend, "decode_prompts", decode_and_change)
    evaluate(compose_config(EvalConfig, WORDS), tmp_path)
    baseline, *drafting = recompute(tmp_path / "results.json").conditions
    assert baseline.lossless == "is the baseline"
    assert {c.label: c.lossless for c in drafting} == dict(
        zip(("eagle", "training"), verdicts, strict=True)
    )
    lines = (tmp_path / "table.txt").read_text().splitlines()
    (row,) = [line for line in lines if line.startswith("lossless")]
    assert [row.count(word) for word in verdicts] == [verdicts.count(word) for word in verdicts]
