"""vLLM 0.24 as far as our driver looks: an engine whose steps our own loop plays.

    monkeypatch.setitem(sys.modules, "vllm", PlayedVllm())

It reads the checkpoint that it is given, decodes it by vLLM's conventions and hands out the rounds
of all running requests step by step, in objects of the shapes that vLLM's have. What a test wants
to go wrong is set on the module.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from mtp_research.config.schema import EngineConfig
from mtp_research.decode.decoder import SpecDecoder
from mtp_research.decode.sampling.sampling_params import SamplingParams
from mtp_research.decode.settings import SpecSettings
from mtp_research.decode.stats import RequestRecord
from mtp_research.heads.engines import ENGINES, run_as
from mtp_research.heads.weights import load_heads
from mtp_research.models.target import load_target


@dataclass
class Params:
    """`vllm.SamplingParams`."""

    temperature: float
    detokenize: bool
    max_tokens: int
    stop_token_ids: list[int]
    ignore_eos: bool
    output_kind: str = "CUMULATIVE"


class PlayedVllm(ModuleType):
    """The module, with what its engines were asked for."""

    def __init__(self, version: str = "0.24.0", engine: str = "vllm") -> None:
        super().__init__("vllm")
        self.__spec__ = ModuleSpec("vllm", None)
        self.__version__ = version
        self.played_engine = engine  # whose conventions are played
        self.words: list[dict[str, Any]] = []
        self.num_open = 0
        self.lost_rounds = 0  # that the counters forget
        self.merged_steps = False  # outputs of two steps in one
        self.SamplingParams = Params
        self.sampling_params = SimpleNamespace(
            RequestOutputKind=SimpleNamespace(DELTA="DELTA", CUMULATIVE="CUMULATIVE")
        )

    def LLM(self, **words: Any) -> SimpleNamespace:
        """An engine; its memory is taken until its core is shut down."""
        self.words.append(words)
        self.num_open += 1
        played = _Engine(self, words)
        return SimpleNamespace(llm_engine=played, get_metrics=played.get_metrics)


@dataclass
class _Request:
    name: str
    prompt: Sequence[int]
    pieces: list[list[int]]
    reason: str


@dataclass
class _Engine:
    module: PlayedVllm
    words: Mapping[str, Any]
    _waiting: list[_Request] = field(default_factory=list)
    _counts: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        words = self.words
        self.num_drafts = words.get("speculative_config", {}).get("num_speculative_tokens", 0)
        self._decoder = loop_of(
            Path(words["model"]),
            words["dtype"],
            num_drafts=self.num_drafts,
            max_model_len=words["max_model_len"],
            conventions=self.module.played_engine,
        )
        self._counts = dict.fromkeys(("num_drafts", "num_draft_tokens", "num_accepted_tokens"), 0)
        self.engine_core = SimpleNamespace(shutdown=self._shutdown)

    def add_request(self, name: str, prompt: Mapping[str, list[int]], params: Params) -> None:
        """Decode it at once, and keep its steps for later."""
        assert params.output_kind == "DELTA"
        sampling = SamplingParams(
            max_new_tokens=params.max_tokens, stop_token_ids=tuple(params.stop_token_ids)
        )
        (record,) = self._decoder.generate([prompt["prompt_token_ids"]], sampling=sampling)
        pieces = pieces_of(record, has_rounds=self.num_drafts > 0)
        if self.module.merged_steps and len(pieces) > 2:
            pieces[1:3] = [[*pieces[1], *pieces[2]]]
        rounds = record.num_accepted_per_round
        self._counts["num_drafts"] += len(rounds) - self.module.lost_rounds * bool(rounds)
        self._counts["num_draft_tokens"] += sum(record.num_drafted_per_round)
        self._counts["num_accepted_tokens"] += sum(rounds)
        self._waiting.append(
            _Request(name, prompt["prompt_token_ids"], pieces, record.finish_reason)
        )

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has more to give."""
        return bool(self._waiting)

    def step(self) -> list[SimpleNamespace]:
        """The next piece of each request that runs; a first step of each gives nothing."""
        running = self._waiting[: self.words["max_num_seqs"]]
        outputs = []
        for request in running:
            piece = request.pieces.pop(0)
            is_last = not request.pieces
            text = SimpleNamespace(
                token_ids=piece, finish_reason=request.reason if is_last else None
            )
            outputs.append(
                SimpleNamespace(
                    request_id=request.name,
                    prompt_token_ids=list(request.prompt),
                    outputs=[text],
                    finished=is_last,
                )
            )
        self._waiting = [request for request in self._waiting if request.pieces]
        return outputs

    def get_metrics(self) -> list[SimpleNamespace]:
        """Counters of speculation among others."""
        assert self.words["disable_log_stats"] is False, "vLLM counts nothing then"
        own = [
            SimpleNamespace(name=f"vllm:spec_decode_{name}", value=count)
            for name, count in self._counts.items()
        ]
        per_position = SimpleNamespace(
            name="vllm:spec_decode_num_accepted_tokens_per_pos", values=[1, 1]
        )
        return [SimpleNamespace(name="vllm:prompt_tokens", value=7), *own, per_position]

    def _shutdown(self) -> None:
        self.module.num_open -= 1


def loop_of(
    checkpoint: Path, dtype: str, *, num_drafts: int, max_model_len: int, conventions: str
) -> SpecDecoder:
    """Our loop over a checkpoint, which runs its modules as the engine `conventions` does."""
    target = load_target(checkpoint, dtype=dtype, device="cpu")
    spec, heads = SpecSettings(num_speculative_tokens=0), None
    if num_drafts:
        run = ENGINES[conventions][target.family_name].run
        assert run.policy is not None
        heads = run_as(load_heads(checkpoint, target), run)
        spec = SpecSettings(num_speculative_tokens=num_drafts, policy=run.policy)
    engine = EngineConfig(max_model_len=max_model_len)
    return SpecDecoder(target, heads, spec=spec, engine=engine)


def pieces_of(record: RequestRecord, *, has_rounds: bool) -> list[list[int]]:
    """What steps added, the last cut by the end of the text; a chunk of the prompt adds nothing."""
    tokens = list(record.output_token_ids)
    sizes = [1, *(kept + 1 for kept in record.num_accepted_per_round)]
    if not has_rounds:
        sizes = [1] * len(tokens)
    pieces: list[list[int]] = [[]]
    for size in sizes:
        pieces.append(tokens[:size])
        tokens = tokens[size:]
    return [piece for index, piece in enumerate(pieces) if piece or index == 0]
