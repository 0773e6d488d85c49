"""The auditor against an independent symbolic recompute, and the simulation built on it."""

import itertools
import re
import subprocess
import sys
from collections import Counter

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st

from mtp_research.policy import audit
from mtp_research.policy.audit import Auditor, Verdict
from mtp_research.policy.fields import POLICIES, HiddenPolicy
from mtp_research.policy.plan import DraftPlan, HiddenKind, PassPlan, ragged_rows
from mtp_research.policy.simulate import SymbolicLoop, main, simulate

FAULTS = (Verdict.WRONG, Verdict.MIXED, Verdict.HOLE)
Row = tuple  # (token, hidden); hidden is ("H", position), ("g",) or the Row of the pass before


class Shadow:
    """Rows as nested symbols: what was written, and what a recompute of the policy would write."""

    def __init__(self, policy: HiddenPolicy, num_drafts: int) -> None:
        self.policy = policy
        self.slots: list[dict[int, Row]] = [{} for _ in range(num_drafts)]

    def record(self, passes: list[tuple[PassPlan, list[int]]]) -> None:
        before: list[Row] = []
        for plan, token_ids in passes:
            rows = []
            for index, token in enumerate(token_ids):
                source = int(plan.hidden_index[index])
                kind = int(plan.hidden_kind[index])
                if kind == HiddenKind.CHAIN:
                    hidden = before[source]
                else:
                    hidden = ("H", source) if kind == HiddenKind.TARGET else ("g",)
                rows.append((token, hidden))
                if plan.writes[index]:
                    self.slots[plan.kv_layer][int(plan.position[index])] = rows[-1]
            before = rows

    def recompute(self, layer: int, slot: int, text: list[int | None]) -> Row:
        """What belongs there; tokens are None beyond the committed text."""
        if not self.policy.shift_tokens:
            return (text[slot + 1], ("H", slot))
        token = text[slot + 1 + layer]
        if self.policy.hidden == "chain" and layer > 0:
            return (token, self.recompute(layer - 1, slot, text))
        return (token, ("H", slot + layer if self.policy.hidden == "shifted_target" else slot))

    def verdicts(self, layer: int, text: list[int], frontier: int) -> Counter:
        padded = [*text, *[None] * 10]
        counts: Counter = Counter()
        for slot in range(frontier + 1):
            if slot not in self.slots[layer]:
                counts[Verdict.HOLE] += 1
                continue
            found, wanted = self.slots[layer][slot], self.recompute(layer, slot, padded)
            pairs = list(zip(_tokens(found), _tokens(wanted), strict=True))
            if any(want is not None and have != want for have, want in pairs):
                counts[Verdict.WRONG] += 1
            elif any(want is None for _, want in pairs):
                counts[Verdict.PROVISIONAL] += 1
            elif found != wanted and _last(wanted)[1] <= frontier:
                counts[Verdict.MIXED] += 1
        return counts


def _tokens(row: Row) -> list[int]:
    token, hidden = row
    return [token, *(_tokens(hidden) if isinstance(hidden[0], int | None) else [])]


def _last(row: Row) -> Row:
    """The innermost hidden vector."""
    while row[0] not in ("H", "g"):
        row = row[1]
    return row


@settings(max_examples=60)
@given(
    policy=st.sampled_from(sorted(POLICIES)),
    num_drafts=st.integers(1, 5),
    num_modules=st.integers(1, 5),
    schedule=st.sampled_from(["cycle", "first", "last"]),
    prompt=st.integers(1, 7),
    history=st.lists(st.integers(0, 5), min_size=1, max_size=9),
)
def test_audit_any_history_equals_symbolic_recompute(
    policy: str,
    num_drafts: int,
    num_modules: int,
    schedule: str,
    prompt: int,
    history: list[int],
) -> None:
    loop = SymbolicLoop(DraftPlan(POLICIES[policy], num_drafts, num_modules, schedule))
    shadow = Shadow(POLICIES[policy], num_drafts)
    fresh = itertools.count()
    drafts = list(itertools.islice(fresh, num_drafts))
    shadow.record(loop.run_round(list(itertools.islice(fresh, prompt + 1)), drafts))
    for count in history:
        emitted = [*drafts[: min(count, num_drafts)], next(fresh)]
        drafts = list(itertools.islice(fresh, num_drafts))
        shadow.record(loop.run_round(emitted, drafts))
        for layer, counts in enumerate(loop.verdicts()):
            expected = shadow.verdicts(layer, loop.text, loop.frontier)
            assert {v: counts[v] for v in Verdict} == {v: expected[v] for v in Verdict}
    faults = sum(counts[fault] for counts in loop.verdicts() for fault in FAULTS)
    assert (loop.auditor.num_dirty_rounds > 0) >= (faults > 0)
    if POLICIES[policy].clean:
        assert loop.auditor.num_dirty_rounds == 0
    event(f"{policy}: {'faults' if faults else 'clean'}")


def _plan(
    positions: list[int], *, layer: int = 0, kind: HiddenKind = HiddenKind.TARGET
) -> PassPlan:
    """A pass of one request over some rows."""
    rows = torch.tensor(positions)
    return PassPlan(
        draft_step=layer,
        module_idx=layer,
        kv_layer=layer,
        layout=ragged_rows(torch.tensor([len(rows)])),
        position=rows,
        token_position=rows + 1,
        hidden_kind=torch.full_like(rows, kind),
        hidden_index=rows,
        writes=torch.ones_like(rows, dtype=torch.bool),
        seq_lens=rows[-1:].int() + 1,
    )


def _auditor(policy: str = "eagle", num_drafts: int = 2, num_layers: int = 1) -> Auditor:
    auditor = Auditor(DraftPlan(POLICIES[policy], num_drafts, num_layers))
    assert auditor.plan.num_kv_layers == num_layers
    return auditor


def _log(
    auditor: Auditor, plan: PassPlan, *, token_ids: torch.Tensor, request_ids: list[str]
) -> None:
    """One pass that is a whole step."""
    auditor.record(plan, token_ids=token_ids, request_ids=request_ids)
    auditor.apply_step()


def test_verdicts_of_hand_made_rows_are_as_defined() -> None:
    auditor, text = _auditor(), [10, 11, 12, 13, 14, 15]
    _log(auditor, _plan([0, 1]), token_ids=torch.tensor([11, 12]), request_ids=["a"])
    _log(
        auditor,
        _plan([2, 4], kind=HiddenKind.DRAFT),
        token_ids=torch.tensor([13, 99]),
        request_ids=["a"],
    )
    (counts,) = auditor.inspect("a", text, frontier=4)
    # 0 and 1 are right, 2 holds a draft-made vector, 3 was never written, 4 has a wrong token
    assert dict(counts) == {
        Verdict.WRONG: 1,
        Verdict.MIXED: 1,
        Verdict.HOLE: 1,
        Verdict.PROVISIONAL: 0,
    }


def test_rows_of_other_requests_and_unwritten_rows_do_not_count() -> None:
    auditor, text = _auditor(), [10, 11, 12]
    plan = _plan([0, 0, 1])
    plan = plan._replace(
        layout=ragged_rows(torch.tensor([1, 2])),
        writes=torch.tensor([True, True, False]),
    )
    _log(auditor, plan, token_ids=torch.tensor([11, 77, 12]), request_ids=["a", "b"])
    assert auditor.inspect("a", text, frontier=1)[0][Verdict.HOLE] == 1
    assert auditor.inspect("a", text, frontier=1)[0][Verdict.WRONG] == 0
    assert auditor.inspect("b", text, frontier=1)[0][Verdict.WRONG] == 1
    assert auditor.inspect("b", text, frontier=1)[0][Verdict.HOLE] == 1


def test_finish_adds_up_and_forgets() -> None:
    auditor, text = _auditor(), [10, 11, 12]
    for name in ("a", "b"):
        _log(auditor, _plan([0]), token_ids=torch.tensor([11]), request_ids=[name])
        auditor.finish(name, text, frontier=1)
    assert auditor.totals[0][Verdict.HOLE] == 2
    assert auditor.num_slots == 4
    assert auditor.inspect("a", text, frontier=1)[0][Verdict.HOLE] == 2  # nothing is known any more


def test_end_round_only_looks_at_slots_a_round_can_touch() -> None:
    auditor = _auditor(num_drafts=1)
    text = list(range(100, 140))
    _log(auditor, _plan(list(range(10, 39))), token_ids=torch.arange(111, 140), request_ids=["a"])
    auditor.end_round("a", text, frontier=38)
    assert (auditor.num_rounds, auditor.num_dirty_rounds) == (1, 0)
    assert auditor.inspect("a", text, frontier=38)[0][Verdict.HOLE] == 10


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize(("num_drafts", "modules"), [(3, 3), (4, 2), (2, 1)])
def test_simulation_is_clean_exactly_for_clean_policies(
    policy: str, num_drafts: int, modules: int
) -> None:
    outcome = simulate(
        DraftPlan(POLICIES[policy], num_drafts, modules),
        acceptance_chance=0.7,
        num_rounds=120,
        seed=1,
    )
    faults = sum(sum(rates.values()) for rates in outcome.fault_rates)
    # One recycled module has no later modules whose rows could be left out.
    is_clean = POLICIES[policy].clean or (policy == "eagle_norefresh" and modules == 1)
    assert (faults == 0) == is_clean
    assert outcome.num_rounds_rejecting_two > 0
    assert outcome.num_slots == pytest.approx(outcome.acceptance_length * 120 + 1)


def test_simulation_window_holes_are_its_fully_accepted_rounds() -> None:
    outcome = simulate(
        DraftPlan(POLICIES["window"], 3, 3),
        acceptance_chance=0.8,
        num_rounds=800,
        seed=0,
    )
    expected = 0.8**3 / (1 + 0.8 + 0.8**2 + 0.8**3)
    for rates in outcome.fault_rates:
        assert rates[Verdict.HOLE] == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize("policy", ["eagle", "training", "training_norefresh"])
def test_simulation_without_double_rejections_is_clean(policy: str) -> None:
    outcome = simulate(
        DraftPlan(POLICIES[policy], 1, 1),
        acceptance_chance=0.5,
        num_rounds=60,
        seed=2,
    )
    assert outcome.num_rounds_rejecting_two == 0
    assert not any(rate for rates in outcome.fault_rates for rate in rates.values())


def test_main_prints_percentages_per_module(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--policy", "training_norefresh", "--k", "3", "--rounds", "150", "--accept", "0.6"]
    assert main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "policy training_norefresh  k 3  modules 3  accept 0.6  rounds 150  seed 0"
    assert lines[2].split() == ["module", "WRONG", "%", "MIXED", "%", "HOLE", "%"]
    table = {line.split()[0]: [float(x) for x in line.split()[1:]] for line in lines[3:]}
    assert list(table) == ["M1", "M2", "M3"]
    assert table["M1"] == [0, 0, 0]
    assert table["M3"][0] > table["M2"][0] >= 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--k", "0"], "--k must be >= 1"),
        (["--modules", "0"], "--modules must be >= 1"),
        (["--rounds", "-3"], "--rounds must be >= 1"),
        (["--accept", "1.5"], r"--accept must be in \[0, 1\]"),
        (["--policy", "eagel"], r"invalid choice: .*; nearest: eagle.*; mtp audit --help"),
    ],
)
def test_main_bad_argument_exits_with_two(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert re.fullmatch(rf"error: .*{message}.*\n", capsys.readouterr().err)


def test_simulation_runs_as_a_command() -> None:
    command = [sys.executable, "-m", "mtp_research", "audit", "--rounds", "20"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1].split() == ["M3", "0.00", "0.00", "0.00"]
    assert done.stderr == ""


def _rounds_of_many(auditors: list[Auditor], names: list[str]) -> None:
    """Each request writes slot 0 rightly; slot 1 is wrong in every second one, a hole in others."""
    text = [10, 11, 12]
    for index, name in enumerate(names):
        plan = _plan([0, 1])._replace(writes=torch.tensor([True, index % 2 == 0]))
        for auditor in auditors:
            _log(auditor, plan, token_ids=torch.tensor([11, 99]), request_ids=[name])
            auditor.end_round(name, text, frontier=1)
            auditor.finish(name, text, frontier=1)


def test_sampled_auditor_counts_its_requests_exactly_and_no_others() -> None:
    names = [f"q{i}" for i in range(60)]
    sampled, full = _auditor(), _auditor()
    sampled.num_requests_per_watched = 4
    watched = [name for name in names if sampled.watches(name)]
    _rounds_of_many([sampled], names)
    _rounds_of_many([full], names)
    assert 5 <= len(watched) <= 30
    assert sampled.num_requests == sampled.num_rounds == len(watched)
    assert sampled.num_slots == 2 * len(watched)
    wrong = sum(names.index(name) % 2 == 0 for name in watched)
    assert sampled.totals[0][Verdict.WRONG] == wrong
    assert sampled.totals[0][Verdict.HOLE] == len(watched) - wrong
    assert full.num_requests == 60


def test_auditor_copies_nothing_for_requests_that_it_does_not_watch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copies: list[int] = []
    copy = torch.Tensor.cpu

    def counted(tensor: torch.Tensor) -> torch.Tensor:
        copies.append(tensor.numel())
        return copy(tensor)

    monkeypatch.setattr(torch.Tensor, "cpu", counted)
    auditor = _auditor()
    auditor.num_requests_per_watched = 4
    names = [f"q{i}" for i in range(40)]
    for name in names:
        auditor.record(_plan([0]), token_ids=torch.tensor([11]), request_ids=[name])
    assert copies == []  # not before the round ends, for anybody
    for name in names:
        if not auditor.watches(name):
            auditor.end_round(name, [10, 11], frontier=0)
            auditor.finish(name, [10, 11], frontier=0)
    assert copies == []


def test_auditor_knows_what_it_took(monkeypatch: pytest.MonkeyPatch) -> None:
    auditor = Auditor(DraftPlan(POLICIES["eagle"], 3, 1))
    ticks = itertools.count()  # a second passes between two looks at the clock
    monkeypatch.setattr(audit.time, "perf_counter", lambda: float(next(ticks)))
    auditor.end_step()
    auditor.apply_step()
    auditor.end_round("a", [5, 6, 7], frontier=1)
    assert auditor.seconds == 2.0
    auditor.finish("a", [5, 6, 7], frontier=1)
    assert auditor.seconds == 3.0
