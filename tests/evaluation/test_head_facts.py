from pathlib import Path

from mtp_research.evaluation.run.decoders import head_facts
from mtp_research.runtime.provenance import REPOSITORY_ROOT

HEADS = REPOSITORY_ROOT / "assets" / "lab_tiny" / "heads"


def test_trained_heads_tell_their_unroll_and_hash() -> None:
    facts = head_facts(str(HEADS / "ttt_n1"))
    assert facts is not None
    assert (facts["name"], facts["unroll"], facts["num_mtp_modules"]) == ("ttt_n1", "ttt", 1)
    assert len(str(facts["sha256"])) == 64
    assert str(facts["conventions"]).startswith("1 module, reads post_norm, recycles post_norm, ")
    assert facts["sha256"] != (head_facts(str(HEADS / "chain_n1")) or {})["sha256"]


def test_heads_without_a_record_have_a_name_and_others_nothing(tmp_path: Path) -> None:
    assert head_facts(str(tmp_path)) == {"name": tmp_path.name}
    assert head_facts(None) is None
    assert head_facts("oracle") is None
