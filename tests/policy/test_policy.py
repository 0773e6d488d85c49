"""The row plan against the worked example of the policies page, slot by slot."""

import dataclasses
import itertools

import pytest

from mtp_research.policy.fields import MATCHING_POLICY, POLICIES, module_index
from mtp_research.policy.plan import DraftPlan
from mtp_research.policy.simulate import SymbolicLoop, trace
from mtp_research.runtime.errors import ConfigError

SCRIPT = "E>FGH 2X>NOP 0K>UVW 3Z>QRS 1J>ijk"

# The page shows the rows that are needed; the frontier-anchored form starts every pass at p - 3.
TRAINING = """
R0 M1 0:B|H_A 1:C|H_B 2:D|H_C 3:E|H_D -> F
R0 M2 0:C|h1[B]@A 1:D|h1[C]@B 2:E|h1[D]@C 3:F|h1[E]@D -> G
R0 M3 0:D|h2[BC]@A 1:E|h2[CD]@B 2:F|h2[DE]@C 3:G|h2[EF]@D -> H
R1 M1 3:E|H_D 4:F|H_E 5:G|H_F 6:X|H_G -> N
R1 M2 3:F|h1[E]@D 4:G|h1[F]@E 5:X|h1[G]@F 6:N|h1[X]@G -> O
R1 M3 3:G|h2[EF]@D 4:X|h2[FG]@E 5:N|h2[GX]@F 6:O|h2[XN]@G -> P
R2 M1 4:F|H_E 5:G|H_F 6:X|H_G 7:K|H_X -> U
R2 M2 4:G|h1[F]@E 5:X|h1[G]@F 6:K|h1[X]@G 7:U|h1[K]@X -> V
R2 M3 4:X|h2[FG]@E 5:K|h2[GX]@F 6:U|h2[XK]@G 7:V|h2[KU]@X -> W
R3 M1 8:U|H_K 9:V|H_U 10:W|H_V 11:Z|H_W -> Q
R3 M2 8:V|h1[U]@K 9:W|h1[V]@U 10:Z|h1[W]@V 11:Q|h1[Z]@W -> R
R3 M3 8:W|h2[UV]@K 9:Z|h2[VW]@U 10:Q|h2[WZ]@V 11:R|h2[ZQ]@W -> S
R4 M1 10:W|H_V 11:Z|H_W 12:Q|H_Z 13:J|H_Q -> i
R4 M2 10:Z|h1[W]@V 11:Q|h1[Z]@W 12:J|h1[Q]@Z 13:i|h1[J]@Q -> j
R4 M3 10:Q|h2[WZ]@V 11:J|h2[ZQ]@W 12:i|h2[QJ]@Z 13:j|h2[Ji]@Q -> k
"""
EAGLE_1 = """
R0 M1 0:B|H_A 1:C|H_B 2:D|H_C 3:E|H_D -> F
R0 M1 4:F|g1 -> G
R0 M1 5:G|g2 -> H
R1 M1 4:F|H_E 5:G|H_F 6:X|H_G -> N
R1 M1 7:N|g1 -> O
R1 M1 8:O|g2 -> P
R2 M1 7:K|H_X -> U
R2 M1 8:U|g1 -> V
R2 M1 9:V|g2 -> W
R3 M1 8:U|H_K 9:V|H_U 10:W|H_V 11:Z|H_W -> Q
R3 M1 12:Q|g1 -> R
R3 M1 13:R|g2 -> S
R4 M1 12:Q|H_Z 13:J|H_Q -> i
R4 M1 14:i|g1 -> j
R4 M1 15:j|g2 -> k
"""
EAGLE_3 = """
R0 M1 0:B|H_A 1:C|H_B 2:D|H_C 3:E|H_D -> F
R0 M2 0:B|H_A 1:C|H_B 2:D|H_C 3:E|H_D 4:F|g1 -> G
R0 M3 0:B|H_A 1:C|H_B 2:D|H_C 3:E|H_D 4:F|g1 5:G|g2 -> H
R1 M1 4:F|H_E 5:G|H_F 6:X|H_G -> N
R1 M2 4:F|H_E 5:G|H_F 6:X|H_G 7:N|g1 -> O
R1 M3 4:F|H_E 5:G|H_F 6:X|H_G 7:N|g1 8:O|g2 -> P
"""
WINDOW_3 = """
R3 M1 9:V|H_U 10:W|H_V 11:Z|H_W -> Q
R3 M2 9:W|H_V 10:Z|H_W 11:Q|g1 -> R
R3 M3 9:Z|H_W 10:Q|g1 11:R|g2 -> S
"""
TARGET_ROLL_3 = """
R2 M1 7:K|H_X -> U
R2 M2 7:U|H_X -> V
R2 M3 7:V|H_X -> W
"""
EAGLE_NOREFRESH_3 = """
R1 M1 4:F|H_E 5:G|H_F 6:X|H_G -> N
R1 M2 7:N|g1 -> O
R1 M3 8:O|g2 -> P
"""
TRAINING_NOREFRESH_3 = """
R2 M1 7:K|H_X -> U
R2 M2 7:U|h1[K]@X -> V
R2 M3 7:V|h2[KU]@X -> W
"""


@pytest.mark.parametrize(
    ("policy", "num_modules", "expected"),
    [
        pytest.param("training", 3, TRAINING, id="training"),
        pytest.param("eagle", 1, EAGLE_1, id="eagle-recycled"),
        pytest.param("eagle", 3, EAGLE_3, id="eagle-three-modules"),
        pytest.param("window", 3, WINDOW_3, id="window"),
        pytest.param("target_roll", 3, TARGET_ROLL_3, id="target-roll"),
        pytest.param("eagle_norefresh", 3, EAGLE_NOREFRESH_3, id="eagle-norefresh"),
        pytest.param("training_norefresh", 3, TRAINING_NOREFRESH_3, id="training-norefresh"),
    ],
)
def test_plan_worked_example_matches_page(policy: str, num_modules: int, expected: str) -> None:
    lines = trace(
        SymbolicLoop(DraftPlan(POLICIES[policy], 3, num_modules)), prompt="ABCD", script=SCRIPT
    )
    passes = [line for line in lines if " audit " not in line]
    wanted = expected.strip().splitlines()
    rounds = {line.split()[0] for line in wanted}
    assert [line for line in passes if line.split()[0] in rounds] == wanted


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_audit_worked_example_is_clean_exactly_for_clean_policies(policy: str) -> None:
    lines = trace(SymbolicLoop(DraftPlan(POLICIES[policy], 3, 3)), prompt="ABCD", script=SCRIPT)
    last = lines[-1].split("audit")[1].split()
    faults = sum(
        int(last[i + 1]) for i, word in enumerate(last) if word in {"WRONG", "MIXED", "HOLE"}
    )
    assert (faults == 0) == POLICIES[policy].clean


def test_window_fully_accepted_round_leaves_one_hole_in_every_module() -> None:
    lines = trace(SymbolicLoop(DraftPlan(POLICIES["window"], 3, 3)), prompt="ABCD", script=SCRIPT)
    audits = {line.split()[0]: line for line in lines if " audit " in line}
    assert audits["R2"].count("HOLE 0") == 3
    assert audits["R3"].count("HOLE 1") == 3


@pytest.mark.parametrize(
    ("policy", "num_modules", "rows"),
    [
        ("eagle", 1, 6),
        ("eagle", 3, 15),
        ("training", 3, 12),
        ("eagle_norefresh", 3, 6),
        ("training_norefresh", 3, 12),
        ("window", 3, 9),
        ("target_roll", 3, 12),
    ],
)
def test_rows_per_step_match_the_table(policy: str, num_modules: int, rows: int) -> None:
    assert DraftPlan(POLICIES[policy], 3, num_modules).num_rows_per_step == rows


def test_module_index_schedules_pick_documented_modules() -> None:
    assert [module_index("cycle", step, 2) for step in range(5)] == [0, 1, 0, 1, 0]
    assert [module_index("first", step, 2) for step in range(3)] == [0, 0, 0]
    assert [module_index("last", step, 2) for step in range(4)] == [0, 1, 1, 1]


def test_slots_needed_grows_with_drafts_and_late_steps() -> None:
    plans = [DraftPlan(POLICIES["eagle"], num_drafts, 1) for num_drafts in range(4)]
    assert plans[0].num_slots_needed(10) == 10
    assert plans[1].num_slots_needed(10) == 11
    assert plans[3].num_slots_needed(10) == 15
    assert plans[3].num_slots_needed(10, num_steps_in_flight=1) == 19


LEGAL = {"rows": ("anchored", "fresh", "window"), "shift_tokens": (False, True)}
LEGAL |= {"hidden": ("chain", "target", "shifted_target"), "every_module": (False, True)}
LEGAL |= {"draft_rows": ("none", "since_last_pass", "newest")}


@pytest.mark.parametrize(("name", "value"), [(n, f"{LEGAL[n][0]}x") for n in LEGAL])
def test_value_that_a_field_does_not_have_is_refused(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be one of"):
        dataclasses.replace(POLICIES["eagle"], **{name: value})


def test_every_policy_that_can_be_made_runs_and_drafts_in_every_pass() -> None:
    made = 0
    for values in itertools.product(*LEGAL.values()):
        fields = dict(zip(LEGAL, values, strict=True))
        try:
            policy = dataclasses.replace(POLICIES["eagle"], name="own", **fields)
        except ConfigError:
            continue
        made += 1
        for num_drafts, num_modules in ((1, 1), (3, 1), (3, 3), (5, 3)):
            accepted = "FGHIJ"[:num_drafts]
            rejected = "NOPQR"[:num_drafts]
            script = f"E>{accepted} {num_drafts}X>{rejected} 0Y>{accepted}"
            loop = SymbolicLoop(DraftPlan(policy, num_drafts, num_modules))
            lines = trace(loop, prompt="ABCD", script=script)
            passes = [line for line in lines if " M" in line and "->" in line]
            assert len(passes) == 3 * num_drafts, (fields, num_drafts)
    assert made == 42  # 14 for each kind of rows


def test_matching_policy_names_known_policies() -> None:
    assert set(MATCHING_POLICY.values()) <= set(POLICIES)
