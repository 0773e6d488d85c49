"""The sections of `eval.py` that say how text is decoded: speculation, sampling and the engine.

`SpecDecoder` takes `EngineConfig` too. Letters: K drafts per step, R requests, T rows of a step.
"""

from dataclasses import dataclass, field

from mtp_research.config_choices import (
    COMPARED_POLICIES,
    DRAFT_LENGTHS,
    MAX_SPECULATIVE_TOKENS,
    MODULE_SCHEDULES,
    POLICIES,
    VERIFY_RULES,
    above,
    one_of,
    within,
)


@dataclass
class SpecConfig:
    """Speculative decoding."""

    # K, alias spec.k; 0 is plain decoding through the same loop.
    num_speculative_tokens: int = within(3, 0, MAX_SPECULATIVE_TOKENS)
    # Each policy of the list is measured.
    policy: list[str] = field(
        default_factory=lambda: list(COMPARED_POLICIES), metadata={"choices": POLICIES}
    )
    # Folder of trained heads. null: every draft is wrong; oracle: every draft is right.
    head: str | None = "assets/lab_tiny/heads/chain_n3"
    module_schedule: str = one_of("cycle", *MODULE_SCHEDULES)
    # standard: rejection sampling; block: the same, drafts judged together; the others are lossy.
    # auto: greedy at temperature 0, standard above.
    verify: str = one_of("greedy", "auto", *VERIFY_RULES)
    # processed: the argmax after the request's own logit processors (penalties, masks).
    draft_sampling: str = one_of("greedy", "greedy", "processed", "sample")
    # fixed: always K drafts. The others make fewer where more do not pay, see decode/draft_length.
    draft_length: str = one_of("fixed", *DRAFT_LENGTHS)
    # confidence: stop before the first draft whose probability is below this.
    draft_p_min: float = within(0.3, 0.0, 1.0)
    # batch_table: drafts by least batch size, such as {1:3,8:2,32:0}.
    draft_table: dict[int, int] = field(default_factory=dict)
    # expected_gain: price of one more draft in steps that make none; None: measured by the clock.
    draft_cost_ratio: float | None = within(None, 0.0, 1e3)
    # Draft from so many tokens only, the most frequent ones by token_ranking.json of spec.head;
    # None: all.
    draft_vocabulary_size: int | None = within(None, 1, 1 << 24)
    # Settings of the lossy rules, each read by the rule that its name begins with; their ranges
    # stand in decode.verify_options.VerifyOptions.
    relaxed_top_n: int = 10
    relaxed_delta: float = 0.6
    relaxed_thinking_token_ids: list[int] | None = None  # begin and end token
    typical_epsilon: float = 0.09
    typical_delta: float = 0.3
    synthetic_rates: list[float] = field(default_factory=list)  # falling, one per draft
    synthetic_length: float | None = None  # instead of rates: mean acceptance length
    synthetic_schedule: str = one_of("minimum_variance", "geometric", "minimum_variance")


@dataclass
class SamplingConfig:
    """How the target's tokens are chosen, and when a request ends."""

    temperature: float = within(0.0, 0.0, 100.0)  # 0 is greedy
    top_k: int = within(0, 0, 1 << 20)  # 0 is off
    top_p: float = above(1.0, 0.0, 1.0)  # 1 is off
    min_p: float = within(0.0, 0.0, 1.0)  # relative to the best token's probability; 0 is off
    repetition_penalty: float = above(1.0, 0.0, 100.0)  # 1 is off
    frequency_penalty: float = within(0.0, -2.0, 2.0)  # per occurrence in the output
    presence_penalty: float = within(0.0, -2.0, 2.0)  # once for a token in the output
    dry_multiplier: float = within(0.0, 0.0, 1e6)  # against repeated sequences; 0 is off
    dry_base: float = within(1.75, 1.0, 1e6)
    dry_allowed_length: int = within(2, 1, 32)  # tokens; shorter repetitions are free
    min_tokens: int = within(0, 0, 1 << 20)  # no stop token before so many
    max_new_tokens: int = within(64, 1, 1 << 20)  # per request
    ignore_eos: bool = False


@dataclass
class EngineConfig:
    """Memory and batching of the decode loop."""

    # KV slots per block; the Triton kernels and eval.py want a power of two from 16 on.
    block_size: int = within(16, 1, 1 << 12)
    # None: enough for max_num_requests, as far as memory_fraction goes.
    num_blocks: int | None = within(None, 1, 1 << 31)
    memory_fraction: float = above(0.9, 0.0, 1.0)  # of a GPU's free memory, for the pool
    max_num_requests: int = within(16, 1, 1 << 16)  # R
    max_num_batched_tokens: int = within(512, 1, 1 << 20)  # T
    max_prefill_chunk: int = within(256, 1, 1 << 20)  # prompt rows of one request in a step
    max_model_len: int | None = within(None, 2, 1 << 24)  # tokens; None: the target's limit
    backend: str = one_of("auto", "auto", "reference", "triton")
    # Keep the KV of finished texts and share it with texts that start alike; changes no output.
    prefix_caching: bool = False
    steps_per_priority: int = within(1000, 1, 1 << 30)  # head start of one level of priority
    # The host learns a step's tokens while the next one runs; changes no output.
    deferred_output: bool = False
    # Replay decode steps as CUDA graphs; wants deferred_output and no audit.
    cuda_graphs: bool = False
    compile: bool = False  # run captured steps through torch.compile
    # Products of compiled steps by our kernel, where it was measured to be faster; Hopper only.
    few_rows_kernel: bool = True
    # Compiled steps rotate queries and keys in the attention launch, not in launches of their own.
    rotary_in_attention: bool = True
    # Kernels of compiled steps start while the one in front ends (programmatic dependent launch),
    # and wait for its end before they touch memory; from Hopper on, else without effect.
    overlap_launches: bool = True
    # Batch sizes that are captured, as far as max_num_requests asks for them: smaller batches are
    # padded to the next one, larger ones split. None: powers of two up to max_num_requests.
    graph_batch_sizes: list[int] | None = field(default=None, metadata={"low": 1, "high": 1 << 16})
    # Steps with up to 1,024 rows, prompt rows among them, are captured too, uncompiled: a request
    # that arrives then stops the others for the time of its rows and not for that of its launches.
    # Wants cuda_graphs; engine=h200 turns it on.
    capture_mixed: bool = False
    # Batch-invariant products and attention: greedy text is the same to the bit for any K, batch
    # and order; wants compile=false.
    deterministic: bool = False
    audit: bool = True  # count WRONG, MIXED and HOLE slots of the draft KV
    audit_every: int = within(1, 1, 1 << 20)  # watch about one request in so many, by id
