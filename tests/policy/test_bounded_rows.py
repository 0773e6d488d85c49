"""A plan whose shapes the host bounds writes what the ragged one writes, and waits for nothing."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mtp_research.policy.fields import MODULE_SCHEDULES, POLICIES
from mtp_research.policy.plan import BaseRows, DraftPlan, PassPlan, StepState
from tests.decode.test_no_sync import NoSync

K = 3


@st.composite
def _requests(draw: st.DrawFn) -> list[dict[str, int | bool]]:
    """Requests after a step: chunks that end inside or at the prompt, and verified rounds."""
    requests = []
    for _ in range(draw(st.integers(1, 4))):
        first, broke = draw(st.integers(0, 12)), draw(st.integers(0, 5)) == 0
        if draw(st.booleans()):
            rows, ends = draw(st.integers(1, 9)), draw(st.booleans())
            known = first + rows + (1 if ends else draw(st.integers(1, 6)))
            requests.append(
                {"first": first, "rows": rows, "fresh": rows, "known": known, "drafting": ends}
                | {"prefilling": True}
            )
        else:
            fresh = 0 if broke else draw(st.integers(1, K + 1))
            requests.append(
                {"first": first, "rows": K + 1, "fresh": fresh, "known": first + fresh + 1}
                | {"drafting": not broke, "prefilling": False}
            )
    return requests


def _state(requests: list[dict[str, int | bool]]) -> StepState:
    def column(name: str) -> torch.Tensor:
        return torch.tensor([request[name] for request in requests])

    first = column("first")
    return StepState(
        first_fresh=first,
        frontier=first + column("fresh") - 1,
        num_known_tokens=column("known"),
        oldest_hidden=(first - K).clamp(min=0),
        drafting=column("drafting"),
        prefilling=column("prefilling"),
    )


def _written(plan: PassPlan) -> list[tuple[int, ...]]:
    """Request, slot, token, kind and hidden of every row that writes; chain rows by their slot."""
    kind, index = plan.hidden_kind, plan.hidden_index
    columns = (plan.layout.request_index, plan.position, plan.token_position, kind)
    columns += (torch.where(kind == 1, plan.position, index),)
    return [
        tuple(int(column[row]) for column in columns) for row in torch.nonzero(plan.writes)[:, 0]
    ]


@settings(max_examples=60, deadline=None)
@given(
    requests=_requests(),
    policy=st.sampled_from(sorted(POLICIES)),
    num_modules=st.integers(1, 4),
    schedule=st.sampled_from(MODULE_SCHEDULES),
)
def test_bounded_plan_writes_what_the_ragged_plan_writes(
    requests: list[dict[str, int | bool]], policy: str, num_modules: int, schedule: str
) -> None:
    state, rows = _state(requests), [int(request["rows"]) for request in requests]
    plan = DraftPlan(POLICIES[policy], K, num_modules, schedule)
    counts = plan.max_base_rows(
        rows, is_prefill=[bool(request["prefilling"]) for request in requests]
    )
    base_rows = BaseRows(torch.tensor(counts), total=sum(counts), longest=max(counts))
    for draft_step in range(K):
        ragged = plan.pass_plan(state, draft_step)
        with NoSync():
            bounded = plan.pass_plan(state, draft_step, base_rows=base_rows)
        assert _written(bounded) == _written(ragged)
        last = bounded.position[bounded.layout.last_rows]
        for row in torch.nonzero(state.drafting)[:, 0].tolist():
            assert last[row] == ragged.position[ragged.layout.last_rows[row]]
        assert torch.equal(bounded.seq_lens[state.drafting], ragged.seq_lens[state.drafting])
