"""What a policy does to the draft KV at a given acceptance, without a model.

    python -m mtp_research.policy.simulate --policy window --k 3 --accept 0.8 --rounds 20000

runs the engine's own row plan on symbols for one long text. In every round draft j is accepted with
the same chance, given that the ones before it were; the auditor then prices the slots that the
modules are left with. All symbols differ, so that no wrong token can pass for the right one.

Letters: K drafts per step, N MTP modules, p frontier row.
"""

import argparse
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass

from mtp_research.policy.audit import Verdict
from mtp_research.policy.fields import MODULE_SCHEDULES, POLICIES
from mtp_research.policy.plan import DraftPlan
from mtp_research.policy.trace import SymbolicLoop

_FAULTS = (Verdict.WRONG, Verdict.MIXED, Verdict.HOLE)


@dataclass(frozen=True)
class Simulation:
    """Outcome of a simulation."""

    # per KV layer (module under the EAGLE policies, depth under the chain policies), share of the
    # slots <= p with each fault
    fault_rates: tuple[dict[Verdict, float], ...]
    num_slots: int  # slots <= p of one layer
    num_rounds: int  # verify rounds
    num_rounds_rejecting_two: int  # rounds with two or more rejected drafts
    acceptance_length: float  # mean tokens per round, bonus counted


def simulate(
    plan: DraftPlan, *, acceptance_chance: float, num_rounds: int, seed: int
) -> Simulation:
    """Run `num_rounds` verify rounds after a prompt of one token.

    Args:
        plan: what to run, K >= 1.
        acceptance_chance: of every draft whose predecessors were accepted, in [0, 1].
        num_rounds: >= 1.
        seed: of the acceptance history.
    """
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
            {fault: verdicts[fault] / num_slots for fault in _FAULTS}
            for verdicts in loop.verdicts()
        ),
        num_slots=num_slots,
        num_rounds=num_rounds,
        num_rounds_rejecting_two=sum(num_drafts - count >= 2 for count in counts),
        acceptance_length=1 + sum(counts) / num_rounds,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of `python -m mtp_research.policy.simulate`."""
    parser = argparse.ArgumentParser(
        prog="python -m mtp_research.policy.simulate",
        description="Faults that a policy leaves in the draft KV at a given acceptance.",
    )
    parser.add_argument("--policy", choices=sorted(POLICIES), default="training")
    parser.add_argument("--k", type=int, default=3, help="drafts per step")
    parser.add_argument("--modules", type=int, default=None, help="MTP modules (default: k)")
    parser.add_argument("--schedule", choices=MODULE_SCHEDULES, default="cycle")
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


def _table(outcome: Simulation) -> list[str]:
    lines = ["module" + "".join(f"{f'{fault} %':>9}" for fault in _FAULTS)]
    for layer, rates in enumerate(outcome.fault_rates):
        lines.append(f"{f'M{layer + 1}':6}" + "".join(f"{100 * rates[f]:9.2f}" for f in _FAULTS))
    return lines


def _take(symbols: "itertools.count[int]", count: int) -> list[int]:
    return list(itertools.islice(symbols, count))


if __name__ == "__main__":
    raise SystemExit(main())
