"""Policies made visible and priced without a model: the engine's own row plan run on symbols.

    mtp trace --policy training --k 3 --modules 3 --prompt ABCD \
        --script 'E>FGH 2X>NOP 0K>UVW'

prints one line per module pass, `slot:token|hidden`, and an audit line per round. `h1[F]@E` is
module 1's output at row E having consumed token F; `H_E` is the target's hidden state at E; `g1` is
the output of the first draft pass at its sampled row. Script items are: accepted count (none for
the prompt), bonus token, `>`, the new drafts.

    mtp audit --policy window --k 3 --accept 0.8 --rounds 20000

runs one long text. In every round draft j is accepted with the same chance, given that the ones
before it were; the auditor then prices the slots that the modules are left with. All symbols
differ, so that no wrong token can pass for the right one.

Letters: K drafts per step, N MTP modules, p frontier row.
"""

import itertools
import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from mtp_research.policy.audit import FAULTS, Auditor, Verdict
from mtp_research.policy.fields import MODULE_SCHEDULES, POLICIES
from mtp_research.policy.plan import DraftPlan, HiddenKind, PassPlan, StepState
from mtp_research.runtime.errors import ConfigError
from mtp_research.runtime.options import OptionParser

_REQUEST = "trace"


@dataclass
class SymbolicLoop:
    """One request whose rounds are dictated from outside."""

    plan: DraftPlan  # what to run
    # committed symbols; single characters when traced, any integers when simulated
    text: list[int] = field(default_factory=list)
    frontier: int = -1  # p after the last round
    auditor: Auditor = field(init=False)  # sees every row

    def __post_init__(self) -> None:
        self.auditor = Auditor(self.plan)

    def run_round(
        self, emitted: Sequence[int], drafts: Sequence[int]
    ) -> list[tuple[PassPlan, list[int]]]:
        """Commit the tokens of a verify step, then draft."""
        first_fresh, num_drafts = self.frontier + 1, self.plan.num_speculative_tokens
        is_prompt = not self.text
        self.text.extend(emitted)
        self.frontier = len(self.text) - 2
        state = StepState(
            first_fresh=torch.tensor([first_fresh]),
            frontier=torch.tensor([self.frontier]),
            num_known_tokens=torch.tensor([len(self.text)]),
            oldest_hidden=torch.tensor([max(0, first_fresh - num_drafts)]),
            drafting=torch.tensor([True]),
            prefilling=torch.tensor([is_prompt]),
        )
        num_known = len(self.text)
        passes = []
        for draft_step in range(num_drafts):
            plan = self.plan.pass_plan(state, draft_step)
            token_ids = [
                self.text[position] if position < num_known else drafts[position - num_known]
                for position in plan.token_position.tolist()
            ]
            self.auditor.record(plan, token_ids=torch.tensor(token_ids), request_ids=[_REQUEST])
            passes.append((plan, token_ids))
        self.auditor.apply_step()
        self.auditor.end_round(_REQUEST, self.text, frontier=self.frontier)
        return passes

    def verdicts(self) -> list[Counter]:
        """Verdict counts of every KV layer over all slots <= p."""
        return self.auditor.inspect(_REQUEST, self.text, frontier=self.frontier)

    def audit_line(self) -> str:
        """The verdict counts in one line."""
        return "  ".join(
            f"M{layer + 1} " + " ".join(f"{verdict} {count[verdict]}" for verdict in Verdict)
            for layer, count in enumerate(self.verdicts())
        )


def format_passes(
    loop: SymbolicLoop,
    passes: list[tuple[PassPlan, list[int]]],
    drafts: Sequence[int],
    *,
    round_index: int,
) -> list[str]:
    """One line per pass: `R1 M2 4:G|h1[F]@E 5:X|h1[G]@F -> O`."""
    lines = []
    consumed: list[str] = []
    for (plan, token_ids), drafted in zip(passes, drafts, strict=True):
        tokens = [chr(token) for token in token_ids]
        is_chain = plan.hidden_kind.tolist() and plan.hidden_kind[0] == HiddenKind.CHAIN
        before, consumed = consumed, [*tokens]
        if is_chain:
            consumed = [old + new for old, new in zip(before, tokens, strict=True)]
        cells = []
        for row, position in enumerate(plan.position.tolist()):
            kind, index = int(plan.hidden_kind[row]), int(plan.hidden_index[row])
            if kind == HiddenKind.TARGET:
                hidden = f"H_{chr(loop.text[index])}"
            elif kind == HiddenKind.DRAFT:
                hidden = f"g{index}"
            else:
                hidden = f"h{plan.draft_step}[{before[index]}]@{chr(loop.text[position])}"
            cells.append(f"{position}:{tokens[row]}|{hidden}")
        lines.append(f"R{round_index} M{plan.module_idx + 1} {' '.join(cells)} -> {chr(drafted)}")
    return lines


def trace(loop: SymbolicLoop, *, prompt: str, script: str) -> list[str]:
    """Lines of a scripted history."""
    lines = []
    drafts, num_drafts = "", loop.plan.num_speculative_tokens
    for round_index, item in enumerate(script.split()):
        match = re.fullmatch(r"(\d*)(\D)>(\D+)", item)
        if match is None or len(match[3]) != num_drafts:
            raise ConfigError(
                f"--script item {item!r} must be <accepted><bonus>><{num_drafts} drafts>, "
                "such as 2X>NOP; the first item has no accepted count."
            )
        num_accepted = int(match[1] or 0)
        if bool(match[1]) != bool(round_index) or num_accepted > len(drafts):
            raise ConfigError(
                f"--script item {item!r} must accept 0..{len(drafts)} drafts "
                "(the first item: none given)."
            )
        emitted = (drafts[:num_accepted] if round_index else prompt) + match[2]
        drafts = match[3]
        draft_ids = [ord(symbol) for symbol in drafts]
        passes = loop.run_round([ord(symbol) for symbol in emitted], draft_ids)
        lines += format_passes(loop, passes, draft_ids, round_index=round_index)
        lines.append(f"R{round_index} audit  {loop.audit_line()}")
    return lines


def trace_main(argv: Sequence[str] | None = None) -> int:
    """Entry of `mtp trace`."""
    parser = _parser("mtp trace", "Print the rows a policy runs.")
    parser.add_argument("--prompt", default="ABCD")
    parser.add_argument("--script", default="E>FGH 2X>NOP 0K>UVW 3Z>QRS 1J>ijk")
    args = parser.parse_args(argv)
    if args.k < 1 or (args.modules is not None and args.modules < 1) or not args.prompt:
        parser.error("--k and --modules must be >= 1 and --prompt must not be empty")
    plan = DraftPlan(POLICIES[args.policy], args.k, args.modules or args.k, args.schedule)
    loop = SymbolicLoop(plan)
    try:
        print("\n".join(trace(loop, prompt=args.prompt, script=args.script)))
    except ConfigError as fault:
        parser.error(str(fault))
    return 0


@dataclass(frozen=True)
class Simulation:
    """Outcome of a simulation."""

    # per KV layer (a module, or a depth under the chain policies), share of the slots <= p by fault
    fault_rates: tuple[dict[Verdict, float], ...]
    num_slots: int  # slots <= p of one layer
    num_rounds: int  # verify rounds
    num_rounds_rejecting_two: int  # rounds with two or more rejected drafts
    acceptance_length: float  # mean tokens per round, bonus counted


def simulate(
    plan: DraftPlan, *, acceptance_chance: float, num_rounds: int, seed: int
) -> Simulation:
    """Run `num_rounds` verify rounds after a prompt of one token."""
    rng = random.Random(seed)
    symbols = itertools.count()
    loop, num_drafts = SymbolicLoop(plan), plan.num_speculative_tokens
    drafts = _take(symbols, num_drafts)
    loop.run_round(_take(symbols, 2), drafts)
    counts = []
    for _ in range(num_rounds):
        is_right = (rng.random() < acceptance_chance for _ in range(num_drafts))
        counts.append(sum(1 for _ in itertools.takewhile(bool, is_right)))
        emitted = [*drafts[: counts[-1]], next(symbols)]
        drafts = _take(symbols, num_drafts)
        loop.run_round(emitted, drafts)
    num_slots = loop.frontier + 1
    return Simulation(
        fault_rates=tuple(
            {fault: verdicts[fault] / num_slots for fault in FAULTS} for verdicts in loop.verdicts()
        ),
        num_slots=num_slots,
        num_rounds=num_rounds,
        num_rounds_rejecting_two=sum(num_drafts - count >= 2 for count in counts),
        acceptance_length=1 + sum(counts) / num_rounds,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of `mtp audit`."""
    description = "Faults that a policy leaves in the draft KV at a given acceptance."
    parser = _parser("mtp audit", description)
    parser.add_argument("--accept", type=float, default=0.8, help="chance that a draft is accepted")
    parser.add_argument("--rounds", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    modules = args.k if args.modules is None else args.modules
    for name, value in (("--k", args.k), ("--modules", modules), ("--rounds", args.rounds)):
        if value < 1:
            parser.error(f"{name} must be >= 1, got {value}")
    if not 0 <= args.accept <= 1:
        parser.error(f"--accept must be in [0, 1], got {args.accept}")
    outcome = simulate(
        DraftPlan(POLICIES[args.policy], args.k, modules, args.schedule),
        acceptance_chance=args.accept,
        num_rounds=args.rounds,
        seed=args.seed,
    )
    print(
        f"policy {args.policy}  k {args.k}  modules {modules}  accept {args.accept:g}  "
        f"rounds {outcome.num_rounds}  seed {args.seed}"
    )
    print(
        f"acceptance length {outcome.acceptance_length:.3f}  "
        f"rounds with >= 2 rejections {outcome.num_rounds_rejecting_two}  "
        f"slots per module {outcome.num_slots}"
    )
    print("\n".join(_table(outcome)))
    return 0


def _parser(prog: str, description: str) -> OptionParser:
    parser = OptionParser(prog=prog, description=description)
    parser.add_argument("--policy", choices=sorted(POLICIES), default="training")
    parser.add_argument("--k", type=int, default=3, help="drafts per step")
    parser.add_argument("--modules", type=int, default=None, help="MTP modules (default: k)")
    parser.add_argument("--schedule", choices=MODULE_SCHEDULES, default="cycle")
    return parser


def _table(outcome: Simulation) -> list[str]:
    lines = ["module" + "".join(f"{f'{fault} %':>9}" for fault in FAULTS)]
    for layer, rates in enumerate(outcome.fault_rates):
        lines.append(f"{f'M{layer + 1}':6}" + "".join(f"{100 * rates[f]:9.2f}" for f in FAULTS))
    return lines


def _take(symbols: "itertools.count[int]", count: int) -> list[int]:
    return list(itertools.islice(symbols, count))
