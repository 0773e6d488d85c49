"""What captured steps of every kind share: the capture itself, static sampling parameters, buckets.

What a CUDA graph of a step cannot hold is refused here by name, before one is captured.

Ranks that share experts meet inside their graphs, so all must replay the same one. Each says what
it would replay (`Wish`), and all take what holds the most of it (`StepShape`): a rank with fewer
requests, or none, has more padding. A capture makes the calls too, so what one rank must capture
all capture then, those included that have it.

A captured step need not be compiled in one piece: what runs between its parts runs while the graph
is captured, and never again. Compiled by themselves, parts that repeat are compiled once: the
passes of a round but for the first one, the target pass of all conditions. What a part is called
with decides what it is compiled for (torch.compile's guards), so nothing here keeps count of it.
What no step of a bucket changes is made before the capture, and read.

Letters: R requests, K drafts per step.
"""

import contextlib
import functools
import itertools
import textwrap
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode, _pop_mode_temporarily

from mtp_research.config.schema import EngineConfig
from mtp_research.decode.draft.drafter import VerifiedStep
from mtp_research.decode.sampling.sampling import SamplingTensors
from mtp_research.decode.schedule.batch import StepInputs
from mtp_research.decode.slot_state import map_tensors
from mtp_research.decode.step import DeviceStep, StepResult
from mtp_research.models.experts import expert_stacks
from mtp_research.models.rewrites.region_pass import uneven_rows
from mtp_research.models.rewrites.regions import CompileOptions, compiled_once, mark_any_size
from mtp_research.models.target import Target
from mtp_research.policy.plan import RowLayout, equal_rows
from mtp_research.runtime.captures import side_stream
from mtp_research.runtime.errors import ConfigError, EnvironmentFault

_BITMASK = (SamplingTensors._fields.index("bitmask"),)  # its place, see `leaves_of`
_LEAST_HALVED = 16  # smallest bucket with another one half-way to the next power of two


def first_requests(result: StepResult, num_requests: int) -> StepResult:
    """A result without that of padding requests."""
    return map_tensors(lambda tensor: tensor[:num_requests], result)


class Kind(NamedTuple):
    """Steps that make the same calls of the other ranks, however their requests are sampled."""

    is_mixed: bool  # has prompt rows
    size: int  # requests or, of a mixed one, rows
    draft_limit: int  # most drafts of a request


class StepShape(NamedTuple):
    """What a step is padded to that is replayed, the same on all ranks that share experts."""

    num_requests: int  # without prompt rows: there is room for so many
    num_mixed_rows: int  # of the bucket with prompt rows; 0: nobody has any
    draft_limit: int
    missing: frozenset[Kind] = frozenset()  # that some rank must capture first, and so all do


class Wish(NamedTuple):
    """What a rank would replay. Of several ranks' wishes the most of each field is one of all."""

    num_requests: int
    has_prompts: bool
    num_mixed_rows: int  # smallest bucket with prompt rows that holds the step; 0: none does
    draft_limit: int
    is_unknown: bool  # nothing that is captured is like it
    cannot_mix: bool  # it cannot be replayed beside another rank's prompt rows

    def numbers(self) -> list[int]:
        """As `of` takes them."""
        return [int(value) for value in self]

    @classmethod
    def of(cls, numbers: Sequence[int]) -> "Wish":
        """The wish of these numbers."""
        num_requests, has_prompts, num_mixed_rows, draft_limit, *flags = numbers
        is_unknown, cannot_mix = map(bool, flags)
        return cls(
            num_requests, bool(has_prompts), num_mixed_rows, draft_limit, is_unknown, cannot_mix
        )

    def shape(self, missing: Iterable[Kind] = ()) -> StepShape | None:
        """What is replayed; None where the step runs as it comes, or nobody has one."""
        is_known = not (self.is_unknown or (self.has_prompts and self.cannot_mix))
        if not is_known or self.num_requests == 0:
            return None
        num_mixed_rows = self.num_mixed_rows if self.has_prompts else 0
        return StepShape(self.num_requests, num_mixed_rows, self.draft_limit, frozenset(missing))


class SharedSteps:
    """What ranks that share experts say and conclude before a step; numbers go by `most` of all.

    Args:
        kinds: all that are captured, in the same order on all ranks.
    """

    def __init__(self, kinds: Sequence[Kind]) -> None:
        self._kinds = kinds
        self._lacking: dict[Hashable, list[int]] = {}  # asked for in every step
        self._num_replays = 0
        self._last = Kind(False, 0, 0)  # that was replayed

    def lacks(self, has: Callable[[Kind], bool], *, key: Hashable) -> list[int]:
        """For each kind, whether it must be captured; `key` is what the answers depend on."""
        if key not in self._lacking:
            self._lacking[key] = [int(not has(kind)) for kind in self._kinds]
        return self._lacking[key]

    def missing(self, lacks: Sequence[int]) -> frozenset[Kind]:
        """The kinds that some rank must capture."""
        return frozenset(itertools.compress(self._kinds, lacks))

    def note_replay(self, kind: Kind) -> None:
        """Note what was launched, for the next `say`."""
        self._num_replays += 1
        self._last = kind

    def say(self, wish: Wish, lacks: Sequence[int]) -> list[int]:
        """A rank's numbers for `agreed`."""
        ran = [self._num_replays, *map(int, self._last)]
        return [*wish.numbers(), *ran, *(-number for number in ran), *lacks]

    def agreed(self, most: Sequence[int]) -> StepShape | None:
        """The shape in which all replay the step, of the most that any has said.

        Ranks whose graphs wait for each other for ever can still be told so here: with deferred
        output a host is a step ahead of its GPU.
        """
        numbers = iter(most)
        wish = Wish.of(list(itertools.islice(numbers, len(Wish._fields))))
        num_facts = 1 + len(Kind._fields)
        largest = list(itertools.islice(numbers, num_facts))
        least = [-number for number in itertools.islice(numbers, num_facts)]
        assert largest == least, (
            f"ranks replayed different steps: numbers {least} to {largest} (replays so far, and of "
            "the last one: has prompt rows, size, drafts)"
        )
        return wish.shape(self.missing(list(numbers)))


class StaticParams:
    """Sampling parameters of a captured step, at fixed addresses."""

    def __init__(self, num_requests: int, *, device: torch.device) -> None:
        self._num_requests, self._device = num_requests, device
        self._storage: dict[Hashable, Tensor] = {}
        self._copied: dict[Hashable, Tensor] = {}  # what the storage holds
        self._uploaded: SamplingTensors | None = None
        self._asked: SamplingTensors | None = None  # whose key is kept
        self._key: tuple[Hashable, ...] = ()

    def upload(self, params: SamplingTensors) -> tuple[Hashable, ...]:
        """Put the parameters of a batch in place, where they are not there already.

        Returns:
            What code depends on, and a graph with it: flags, the parts that are there, and shapes.
        """
        key = self.key_of(params)
        if params is not self._uploaded:
            for place, value in leaves_of(params):
                if isinstance(value, Tensor):
                    self._copy((place, value.shape[1:]), value)
            self._uploaded = params
        return key

    def key_of(self, params: SamplingTensors) -> tuple[Hashable, ...]:
        """What `upload` returns."""
        if params is not self._asked:
            self._asked = params
            self._key = tuple(
                (place, tuple(value.shape[1:]) if isinstance(value, Tensor) else value)
                for place, value in leaves_of(params)
            )
        return self._key

    def view(self, params: SamplingTensors, num_requests: int) -> SamplingTensors:
        """Flags of `params`, which were uploaded, over the storage of the first requests."""
        places = iter([place for place, value in leaves_of(params) if isinstance(value, Tensor)])
        return map_tensors(
            lambda value: self._storage[next(places), value.shape[1:]][:num_requests], params
        )

    def write_bitmask(self, bitmask: Tensor, *, after: torch.cuda.Event | None) -> None:
        """Put a step's masks, which are on the host, in the place of those that were uploaded.

        What is launched from now on reads them. On a GPU they are copied beside the work that was
        launched behind `after`, which must not use them.
        """
        place = self._storage[_BITMASK, bitmask.shape[1:]][: len(bitmask)]
        if after is None:
            place.copy_(bitmask)
            return
        copies = side_stream(place.get_device())
        with torch.cuda.stream(copies):
            copies.wait_event(after)
            place.copy_(bitmask, non_blocking=True)
        torch.cuda.current_stream().wait_stream(copies)

    def _copy(self, address: Hashable, value: Tensor) -> None:
        held = self._copied.get(address)  # what lies at an address while it is held stays the same
        if held is not None and held.data_ptr() == value.data_ptr() and len(held) >= len(value):
            return
        if address not in self._storage:
            shape = (self._num_requests, *value.shape[1:])
            self._storage[address] = torch.ones(shape, dtype=value.dtype, device=self._device)
        self._storage[address][: len(value)] = value
        self._copied[address] = value


def leaves_of(
    value: object, place: tuple[int, ...] = ()
) -> Iterator[tuple[tuple[int, ...], object]]:
    """Tensors, flags and None of nested named tuples, each with the fields that lead to it."""
    if not isinstance(value, tuple):
        yield place, value
        return
    for index, part in enumerate(value):
        yield from leaves_of(part, (*place, index))


_STACK_DIM = 3  # of the weights of a layer's experts, [E, out, in]


def require_capturable(step: DeviceStep, *, engine: EngineConfig) -> None:
    """Refuse targets, machines and settings with which `engine.cuda_graphs=true` cannot work."""
    require_capturable_target(step.target, step.heads, engine=engine)


def require_capturable_target(
    target: Target, heads: nn.Module | None = None, *, engine: EngineConfig
) -> None:
    """What `require_capturable` asks of target and heads, before there is a decoder."""
    if target.has_recurrent_state:
        raise ConfigError(
            "engine.cuda_graphs=true does not support recurrent layers, got family "
            f"{target.family_name}; set engine.cuda_graphs=false engine.compile=false."
        )
    models = [model for model in (target.model, heads) if model is not None]
    require_no_host_loop(models, family_name=target.family_name)
    if target.device.type != "cuda":
        raise EnvironmentFault(
            f"engine.cuda_graphs=true needs the model on a CUDA GPU, got {target.device}; "
            "set engine=auto."
        )
    if engine.audit or not engine.deferred_output:
        raise ConfigError(
            "engine.cuda_graphs=true needs engine.deferred_output=true and engine.audit=false, got "
            f"{engine.deferred_output} and {engine.audit}; set engine=h200."
        )
    if not engine.deterministic:  # which has a grouped product of its own
        require_grouped_experts(models, dtype=str(target.dtype).removeprefix("torch."))


def require_no_host_loop(models: Sequence[nn.Module], *, family_name: str) -> None:
    """Refuse experts that the library runs in a loop of its own and in no other way.

    The loop asks the device which experts were chosen, and a graph cannot answer.
    """
    for model in models:
        known = {id(stack) for stack in expert_stacks(model)}
        for module in model.modules():
            has_stack = any(p.dim() == _STACK_DIM for p in module.parameters(recurse=False))
            if has_stack and id(module) not in known:
                raise ConfigError(
                    "engine.cuda_graphs=true needs experts that run without the host, got family "
                    f"{family_name}, whose {type(module).__name__} has stacked weights that "
                    "transformers runs in a Python loop; set engine.cuda_graphs=false "
                    "engine.compile=false."
                )


def require_grouped_experts(models: Sequence[nn.Module], *, dtype: str) -> None:
    """Refuse the loop over experts where the library has a grouped product as well."""
    for stack in (stack for model in models for stack in expert_stacks(model)):
        if stack.config._experts_implementation == "eager":
            raise ConfigError(
                "engine.cuda_graphs=true needs model.dtype=bfloat16 for a target with experts, got "
                f"{dtype}, in which transformers runs {type(stack).__name__} in a Python loop; set "
                "model.dtype=bfloat16, engine=h200_deterministic, or engine.cuda_graphs=false "
                "engine.compile=false."
            )


def captured_sizes(
    max_num_requests: int, *, wanted: Sequence[int] | None, least: int = 1
) -> tuple[int, ...]:
    """Buckets, ascending: the sizes wanted, none of them above the largest batch there can be.

    Where none are wanted, powers of two and, from 16 on, the middle between two of them: requests
    that have ended leave places, and a batch pays for those of its bucket. For example 6 requests
    at most give 2, 4, 6, and 64 give 2, 4, 8, 16, 24, 32, 48, 64; with `[4, 8]` wanted 6 give 4 and
    6, and with `[4]` alone 4, to which larger batches are split. A batch of 1 is padded to 2,
    unless 1 is wanted (and `least`, the smallest that may be): for the compiler it is a case of its
    own, with faster kernels.
    """
    powers = [1 << power for power in range(1, max_num_requests.bit_length() + 1)]
    middles = [size * 3 // 2 for size in powers if size >= _LEAST_HALVED]
    sizes = (min(size, max_num_requests) for size in wanted or (*powers, *middles))
    return tuple(sorted({max(size, least) for size in sizes}))


def bucket_of(num_requests: int, batch_sizes: Sequence[int]) -> int:
    """Smallest bucket that holds a batch."""
    return batch_sizes[bisect_left(batch_sizes, num_requests)]


def split_batch(num_requests: int, largest: int) -> list[slice]:
    """Parts of a batch that fit the largest bucket, all but the last one full."""
    return [
        slice(start, min(start + largest, num_requests))
        for start in range(0, num_requests, largest)
    ]


@dataclass(frozen=True)
class CompiledParts:
    """See `batch.PartCompiler`."""

    options: CompileOptions  # of `torch.compile`
    numbers: tuple[Tensor, ...]  # 0..K, each int64 `[]`
    serves_uneven_rows: bool
    _layouts: dict[tuple[int, int], RowLayout] = field(default_factory=dict)  # by rows, requests

    @classmethod
    def on(
        cls,
        device: torch.device,
        options: CompileOptions,
        *,
        num_drafts: int,
        serves_uneven_rows: bool,
    ) -> "CompiledParts":
        """Parts of steps of K drafts."""
        numbers = (torch.tensor(number, device=device) for number in range(num_drafts + 1))
        return cls(options, tuple(numbers), serves_uneven_rows)

    def equal_rows(self, num_rows: int, like: Tensor) -> RowLayout:
        """See `PartCompiler`; made by the runs that warm a capture up."""
        key = (num_rows, len(like))
        if key not in self._layouts:
            self._layouts[key] = equal_rows(num_rows, like)
        return self._layouts[key]

    def compiled(self, part: Callable, *, longest: int = 0) -> Callable:
        """See `PartCompiler`; for any size above 1 of the first dim of its tensors."""
        return functools.partial(_call, compiled_once(part, tuple(self.options.items())), longest)


def _call(part: Callable, longest: int, *args: object, **kwargs: object) -> object:
    _mark((args, tuple(kwargs.values())))
    is_inside = _get_current_function_mode() is not None  # of deterministic parts: see `_inside`
    with (
        _pop_mode_temporarily() if is_inside else contextlib.nullcontext(),
        uneven_rows(longest),
    ):
        try:
            return part(*args, **kwargs)
        except torch._dynamo.exc.TorchDynamoException as fault:
            text = textwrap.shorten(str(fault).split("\n\n")[0], 300)
            raise EnvironmentFault(
                f"torch {torch.__version__} must compile every part of a step, got "
                f"{type(fault).__name__} in {part.__name__} ({text}); set engine.compile=false. "
                "--traceback prints all: a fault of torch, its compilers or a rule of one's own."
            ) from fault


def _mark(value: object) -> None:
    """Any number of rows and requests in tuples, lists and a step's own classes."""
    if isinstance(value, Tensor):
        if value.dim() > 0:
            mark_any_size(value, dim=0)
    elif isinstance(value, StepInputs | VerifiedStep):
        _mark(tuple(vars(value).values()))
    elif isinstance(value, tuple | list):
        for one in value:
            _mark(one)
