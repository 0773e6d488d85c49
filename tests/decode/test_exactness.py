"""The loop against a from-scratch recompute in float64, over random acceptance histories."""

import random

import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from mtp_research.config.schema import EngineConfig
from mtp_research.decode.decoder import SpecDecoder
from mtp_research.decode.sampling.sampling_params import SamplingParams
from mtp_research.decode.settings import SpecSettings
from mtp_research.decode.step import Verified
from mtp_research.decode.verify.verify import PADDING_TOKEN_ID, VerifyOutput
from mtp_research.heads.stack import MTPModule
from tests import oracle, tiny

VOCAB = 128
ALL_TESTED = ("qwen3", "glm4_moe", "deepseek_v3", "mimo_v2")
FAMILIES_TESTED = ("glm4_moe", "deepseek_v3", "glm4_moe_lite", "mimo_v2")


@pytest.fixture(scope="module", params=ALL_TESTED)
def target(request: pytest.FixtureRequest):
    return tiny.tiny_target(request.param)


@pytest.fixture(scope="module")
def dense_target():
    return tiny.tiny_target("qwen3")


@pytest.fixture(scope="module", params=FAMILIES_TESTED)
def family_target(request: pytest.FixtureRequest):
    """Experts, latent pages, sliding layers with sinks and other heads than the full ones."""
    return tiny.tiny_target(request.param)


class DictatedLoop:
    """A decoder whose verifier obeys a random history, and whose draft logits are recorded.

    With `break_chance` a verification with drafts fails as if its logits were not finite.
    """

    def __init__(self, decoder: SpecDecoder, *, seed: int, break_chance: float = 0.0) -> None:
        self.decoder = decoder
        self.break_chance = break_chance
        self.rng = random.Random(seed)
        self.draft_logits: list[torch.Tensor] = []
        decoder.observe(lambda parts: parts._replace(verify=self._verify))
        heads = decoder.drafter.heads
        self._logits = heads.own_logits
        heads.own_logits = self._record

    def close(self) -> None:
        self.decoder.drafter.heads.own_logits = self._logits

    def _record(self, post_norm: torch.Tensor, *, module: MTPModule) -> torch.Tensor:
        self.draft_logits.append(self._logits(post_norm, module=module))
        return self.draft_logits[-1]

    def _verify(self, inputs, target, params) -> Verified:
        num_drafts = self.decoder.num_speculative_tokens
        accepted, sampled = [], []
        for row in range(len(inputs.slots)):
            count = self.rng.randint(0, int(inputs.num_drafts[row]))
            drafts = inputs.draft_token_ids[row, :count].tolist()
            accepted.append(count)
            sampled.append(
                [*drafts, self.rng.randrange(VOCAB), *[PADDING_TOKEN_ID] * (num_drafts - count)]
            )
        breaks = torch.tensor([self.rng.random() < self.break_chance for _ in accepted])
        finite = ~breaks | (inputs.num_drafts == 0)
        tokens = torch.tensor(sampled).masked_fill(~finite[:, None], PADDING_TOKEN_ID)
        return Verified(VerifyOutput(torch.tensor(accepted) * finite, tokens, finite), None)

    def step_and_compare(self, policy: str) -> float:
        """Largest difference between recorded and oracle draft logits of requests that drafted."""
        self.draft_logits.clear()
        requests = {r.request_id: r for r in self.decoder.scheduler.requests()}
        before = {name: r.num_computed_tokens for name, r in requests.items()}
        schedule = self.decoder.scheduler.schedule
        order: list[str] = []

        def spy():
            result = schedule()
            order.extend(entry.request.request_id for entry in result.entries)
            return result

        self.decoder.scheduler.schedule = spy
        self.decoder.step()
        self.decoder.scheduler.schedule = schedule
        self.decoder.scheduler.check_integrity()
        step_logits = list(self.draft_logits)  # the oracle below goes through the recorder too
        differences = [torch.zeros((), dtype=torch.float64)]
        for row, name in enumerate(order):
            request = requests[name]
            if (
                request.slot is None
                or request.is_prefilling
                or request.num_computed_tokens == before[name]
            ):
                continue
            drafts, logits = oracle.DRAFTS[policy](
                self.decoder.drafter.heads, request.token_ids, self.decoder.num_speculative_tokens
            )
            assert request.draft_token_ids == drafts
            for recorded, expected in zip(step_logits, logits, strict=True):
                differences.append((recorded[row] - expected).abs().max())
        return float(torch.stack(differences).max())  # unlike Python's max, NaN comes through


def _assert_drafts_equal_full_recompute(
    target, *, policy: str, num_modules: int, chunk: int, **spec: str
) -> None:
    heads = tiny.tiny_heads(target, num_mtp_modules=num_modules, **spec)
    rng = random.Random(chunk * 10 + num_modules)
    engine = EngineConfig(max_num_requests=3, max_prefill_chunk=chunk)
    loop = DictatedLoop(
        SpecDecoder(
            target, heads, spec=SpecSettings(policy=policy, num_speculative_tokens=3), engine=engine
        ),
        seed=chunk,
    )
    for length in (1, 2, 9, 5):  # four requests on three slots: one slot is used again
        loop.decoder.add_request(
            [rng.randrange(VOCAB) for _ in range(length)], sampling=SamplingParams(max_new_tokens=8)
        )
    while loop.decoder.scheduler.has_work:
        assert loop.step_and_compare(policy) < 1e-10
    loop.close()
    assert loop.decoder.auditor.num_dirty_rounds == 0
    blocks = loop.decoder.scheduler.blocks
    assert blocks.num_free_blocks == blocks.num_blocks


@pytest.mark.parametrize("chunk", [1, 3, 256])
@pytest.mark.parametrize(
    ("policy", "num_modules"),
    [("training", 3), ("training", 2), ("training", 1), ("eagle", 1), ("eagle", 2), ("eagle", 3)],
)
def test_drafts_equal_full_recompute_for_any_history(
    dense_target, policy: str, num_modules: int, chunk: int
) -> None:
    _assert_drafts_equal_full_recompute(
        dense_target, policy=policy, num_modules=num_modules, chunk=chunk
    )


@pytest.mark.parametrize("recycle_norm", ["pre_norm", "post_norm"])
@pytest.mark.parametrize("hidden_source", ["pre_norm", "post_norm"])
@pytest.mark.parametrize(("policy", "num_modules"), [("training", 2), ("eagle", 1), ("eagle", 3)])
def test_drafts_read_the_norms_that_the_head_records(
    dense_target, policy: str, num_modules: int, hidden_source: str, recycle_norm: str
) -> None:
    _assert_drafts_equal_full_recompute(
        dense_target,
        policy=policy,
        num_modules=num_modules,
        chunk=3,  # histories that are read from the ring, too
        hidden_source=hidden_source,
        recycle_norm=recycle_norm,
    )


@pytest.mark.parametrize(
    ("policy", "num_modules", "chunk"),
    [("training", 3, 3), ("training", 1, 256), ("eagle", 1, 3), ("eagle", 3, 256)],
)
def test_drafts_of_families_equal_full_recompute_for_any_history(
    policy: str, num_modules: int, chunk: int, family_target
) -> None:
    _assert_drafts_equal_full_recompute(
        family_target, policy=policy, num_modules=num_modules, chunk=chunk
    )


@settings(
    max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    policy=st.sampled_from(["training", "eagle"]),
    num_drafts=st.integers(1, 5),
    num_modules=st.integers(1, 4),
    chunk=st.integers(1, 12),
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=4),
    seed=st.integers(0, 2**20),
    num_blocks=st.integers(10, 16),
)
def test_drafts_equal_full_recompute_under_preemption(
    dense_target,
    policy: str,
    num_drafts: int,
    num_modules: int,
    chunk: int,
    lengths: list[int],
    seed: int,
    num_blocks: int,
) -> None:
    heads = tiny.tiny_heads(dense_target, num_mtp_modules=num_modules)
    engine = EngineConfig(
        max_num_requests=4, max_prefill_chunk=chunk, num_blocks=num_blocks, block_size=4
    )
    decoder = SpecDecoder(
        dense_target,
        heads,
        spec=SpecSettings(policy=policy, num_speculative_tokens=num_drafts),
        engine=engine,
    )
    _run_and_compare(decoder, policy, lengths=lengths, seed=seed)
    event("preempted" if decoder.stats.num_preemptions else "undisturbed")


@pytest.mark.parametrize(("policy", "num_modules"), [("training", 3), ("eagle", 1)])
def test_drafts_of_families_equal_full_recompute_under_preemption(
    policy: str, num_modules: int, family_target
) -> None:
    heads = tiny.tiny_heads(family_target, num_mtp_modules=num_modules)
    engine = EngineConfig(max_num_requests=4, max_prefill_chunk=5, num_blocks=11, block_size=4)
    decoder = SpecDecoder(family_target, heads, spec=SpecSettings(policy=policy), engine=engine)
    _run_and_compare(decoder, policy, lengths=[9, 14, 3, 11], seed=num_modules)
    assert decoder.stats.num_preemptions > 0


def _run_and_compare(decoder: SpecDecoder, policy: str, *, lengths: list[int], seed: int) -> None:
    loop = DictatedLoop(decoder, seed=seed)
    rng = random.Random(seed)
    for length in lengths:
        decoder.add_request(
            [rng.randrange(VOCAB) for _ in range(length)], sampling=SamplingParams(max_new_tokens=8)
        )
    while decoder.scheduler.has_work:
        assert loop.step_and_compare(policy) < 1e-10
    loop.close()
    assert decoder.auditor.num_dirty_rounds == 0


@pytest.mark.parametrize(("policy", "num_modules"), [("training", 3), ("eagle", 1), ("eagle", 3)])
def test_drafts_equal_full_recompute_after_broken_verifications(
    dense_target, policy: str, num_modules: int
) -> None:
    heads = tiny.tiny_heads(dense_target, num_mtp_modules=num_modules)
    loop = DictatedLoop(
        SpecDecoder(dense_target, heads, spec=SpecSettings(policy=policy)), seed=4, break_chance=0.3
    )
    for prompt in ([5, 9, 77, 31, 2, 64], [8]):
        loop.decoder.add_request(prompt, sampling=SamplingParams(max_new_tokens=14))
    while loop.decoder.scheduler.has_work:
        assert loop.step_and_compare(policy) < 1e-10
    loop.close()
    assert all(len(record.output_token_ids) == 14 for record in loop.decoder.stats.records)


def _drafts_of(decoder: SpecDecoder, prompt: list[int]) -> list[int]:
    request = decoder.add_request(prompt, sampling=SamplingParams(max_new_tokens=50))
    while request.is_prefilling:
        decoder.step()
    return request.draft_token_ids


def test_policies_coincide_for_one_draft(target) -> None:
    heads = tiny.tiny_heads(target, num_mtp_modules=1)
    prompt = [5, 9, 77, 31, 2, 64]
    drafts = [
        _drafts_of(
            SpecDecoder(target, heads, spec=SpecSettings(policy=policy, num_speculative_tokens=1)),
            prompt,
        )
        for policy in ("eagle", "training")
    ]
    assert drafts[0] == drafts[1]


def test_copied_module_eagle_with_modules_equals_recycled(target) -> None:
    one = tiny.tiny_heads(target, num_mtp_modules=1)
    three = tiny.tiny_heads(target, num_mtp_modules=3)
    for module in three.mtp_modules:
        module.load_state_dict(one.mtp_modules[0].state_dict())
    prompts = [[5, 9, 77, 31, 2, 64], [8, 8, 100]]
    for prompt in prompts:
        recycled = _drafts_of(SpecDecoder(target, one, spec=SpecSettings(policy="eagle")), prompt)
        refreshed = _drafts_of(
            SpecDecoder(target, three, spec=SpecSettings(policy="eagle")), prompt
        )
        chained = _drafts_of(
            SpecDecoder(target, three, spec=SpecSettings(policy="training")), prompt
        )
        assert recycled == refreshed
        assert chained[0] == refreshed[0]
    # With tied weights the policies still differ from the second draft on.
    assert any(
        _drafts_of(SpecDecoder(target, three, spec=SpecSettings(policy="training")), p)
        != _drafts_of(SpecDecoder(target, three, spec=SpecSettings(policy="eagle")), p)
        for p in ([i, 3 * i % VOCAB, 7, 90 - i] for i in range(1, 20))
    )


@pytest.mark.parametrize("policy", ["eagle", "training"])
def test_foreign_pages_filled_with_nan_change_nothing(target, policy: str) -> None:
    heads = tiny.tiny_heads(target)
    outputs = []
    for poison in (False, True):
        decoder = SpecDecoder(
            target,
            heads,
            spec=SpecSettings(policy=policy),
            engine=EngineConfig(max_num_requests=4, max_prefill_chunk=5),
        )
        if poison:
            decoder.cache.fill(torch.nan)
            decoder.slot_state.hidden.fill_(torch.nan)
        prompts = [[3, 4, 5, 6, 7, 8], [9], [10, 11], list(range(20, 43))]
        for prompt in prompts:
            decoder.add_request(prompt, sampling=SamplingParams(max_new_tokens=7))
        seen = []
        while decoder.scheduler.has_work:
            decoder.step()
            seen.append([(r.token_ids[:], r.draft_token_ids) for r in decoder.scheduler.running])
        outputs.append(seen)
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("policy", ["eagle", "training"])
def test_permuting_requests_permutes_outputs(target, policy: str) -> None:
    heads = tiny.tiny_heads(target)
    prompts = [[i, 2 * i + 1, 3] * (1 + i % 3) for i in range(1, 5)]
    forward = {
        r.request_id: (r.output_token_ids, r.num_accepted_per_round)
        for r in _generate(target, heads, policy, prompts)
    }
    backward = {
        r.request_id: (r.output_token_ids, r.num_accepted_per_round)
        for r in _generate(target, heads, policy, prompts[::-1])
    }
    assert forward == {
        str(len(prompts) - 1 - int(name)): record for name, record in backward.items()
    }


def _generate(target, heads, policy: str, prompts: list[list[int]]):
    decoder = SpecDecoder(
        target, heads, spec=SpecSettings(policy=policy), engine=EngineConfig(max_num_requests=2)
    )
    return list(decoder.generate(prompts, max_new_tokens=6))
