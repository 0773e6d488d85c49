"""Rotary embeddings of compiled steps, left to the attention launch that reads and stores the rows.

The library's attention layers call a function of their own module by name, rotate queries and keys
with it, and hand them to the attention function. Here such a layer gets a second forward: the same
code over names of its own, in which that function keeps cos and sin for the attention call and
rotates nothing. The library's module and its function stay as they are.

A layer is taken if, on test rows, rotating what its second forward hands over gives the very
numbers that its own forward hands over; so pairs instead of halves, norms behind the rotation and
rotated parts of latents are told apart without knowing a family. Without `torch.compile`, in passes
over anything but pages, and in those whose rows the launch does not store, a layer does what it
did.
"""

import functools
import logging
import types
from collections.abc import Iterable, Iterator
from typing import cast

import torch
from torch import Tensor, nn

from mtp_research.kernels.attention.store_kv import rotate_ref
from mtp_research.models.attention.attention import AttentionCall
from mtp_research.models.attention.paged import Angles, PassOverPages
from mtp_research.models.rewrites.cpu_layers import variant_of
from mtp_research.models.target import Target

logger = logging.getLogger(__name__)
# What the library's attention layers call.
_FUNCTION = "apply_rotary_pos_emb"
_NUM_TEST_ROWS = 3


class RotaryInAttention(nn.Module):
    """Marks the classes that `leave_rotary_to_attention` makes."""

    leaves_rotary: bool


class _Kept:
    """Cos and sin on their way from a layer's rotary call to its attention call."""

    def __init__(self) -> None:
        self.angles: Angles | None = None

    def keep(
        self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *others: object, **named: object
    ) -> tuple[Tensor, Tensor]:
        """Queries and keys as they are, in place of the library's function; other calls fail."""
        # With a dimension of its own the call means other rows than we would rotate.
        self.angles = None if others or named else Angles(cos, sin)
        return q, k

    def take(self) -> Angles | None:
        """The angles; compiled code must leave nothing behind."""
        angles, self.angles = self.angles, None
        return angles


class _RotatingContext:
    """An `AttentionContext` that adds the angles to what a layer hands over."""

    def __init__(self, context: PassOverPages, kept: _Kept) -> None:
        self.context = context
        self.kept = kept

    def attend(self, module: nn.Module, call: AttentionCall) -> Tensor:
        """See `AttentionContext`."""
        return self.context.attend(module, call, angles=self.kept.take())


def leave_rotary_to_attention(target: Target, model: nn.Module, *, enabled: bool) -> int:
    """Let attention layers of `model` leave the rotation to the launch, in place; returns how many.

    `target` gives size, cos and sin of the test rows. Without `enabled`, layers that an earlier
    call has changed are put back.
    """
    if not enabled:
        for module in model.modules():
            if isinstance(module, RotaryInAttention):
                module.leaves_rotary = False
        return 0
    hidden = torch.linspace(-3.0, 3.0, _NUM_TEST_ROWS * target.config.hidden_size)
    hidden = hidden.sin().view(1, _NUM_TEST_ROWS, -1).to(target.device, target.dtype)
    position_ids = torch.arange(7, 7 + _NUM_TEST_ROWS, device=target.device)[None]
    with torch.no_grad():
        angles = Angles(*target.position_embeddings(hidden, position_ids))
    count = 0
    for module in list(model.modules()):
        if not isinstance(module, RotaryInAttention):
            if not (_calls_rotary(module) and _rotates_halves(module, hidden, angles)):
                continue
            module.__class__ = _leaving(type(module))
        cast(RotaryInAttention, module).leaves_rotary = True
        count += 1
    return count


def _calls_rotary(module: nn.Module) -> bool:
    """Whether the class's own forward, replaced by nothing, names the library's function."""
    forward = type(module).forward
    if "forward" in vars(module) or not isinstance(forward, types.FunctionType):
        return False
    return _FUNCTION in forward.__code__.co_names and _FUNCTION in forward.__globals__


class Recorder:
    """An `AttentionContext` that remembers what it was called with."""

    def __init__(self) -> None:
        self.call: AttentionCall | None = None

    def attend(self, module: nn.Module, call: AttentionCall) -> Tensor:
        """Zeros for every row."""
        self.call = call
        num_heads, num_rows = call.query.shape[1:3]
        return call.query.new_zeros(1, num_rows, num_heads, call.value.shape[3])


def _rotates_halves(module: nn.Module, hidden: Tensor, angles: Angles) -> bool:
    """Whether rotating what `module` hands over without its rotation gives what it hands over."""
    try:
        return _gives_its_rows(module, hidden, angles)
    except (TypeError, RuntimeError) as fault:  # another signature, width or dtype
        logger.debug("%s keeps its rotation: %s", type(module).__name__, fault)
        return False


@torch.no_grad()
def _gives_its_rows(module: nn.Module, hidden: Tensor, angles: Angles) -> bool:
    plain, kept = type(module).forward, _Kept()
    handed_over = []
    for forward in (plain, _second_forward(plain, kept)):
        recorder = Recorder()
        forward(
            module,
            hidden_states=hidden,
            position_embeddings=tuple(angles),
            attention_mask=None,
            past_key_values=None,
            attention_context=recorder,
        )
        handed_over.append(recorder.call)
    own, left = handed_over
    if own is None or left is None or kept.angles is None:
        return False
    cos, sin = (part[0] for part in kept.angles)
    is_rotation = 0 < cos.shape[-1] <= left.key.shape[-1] and cos.dtype == left.key.dtype
    if not is_rotation or torch.equal(own.key, left.key):  # zeros would prove nothing
        return False
    for wanted, rows in zip(own[:2], left[:2], strict=True):
        rotated = rotate_ref(rows[0].transpose(0, 1), cos, sin).transpose(0, 1)[None]
        if wanted.dtype != rotated.dtype or not torch.equal(wanted, rotated):
            return False
    return True


@functools.cache
def _leaving(plain: type[nn.Module]) -> type[nn.Module]:
    """The class `plain` with the second forward for compiled passes over pages."""
    kept = _Kept()
    second_forward = _second_forward(cast(types.FunctionType, plain.forward), kept)

    def forward(self: RotaryInAttention, *args: object, **kwargs: object) -> object:
        context = kwargs.get("attention_context")
        compiles = torch.compiler.is_compiling() and self.leaves_rotary
        if not (compiles and isinstance(context, PassOverPages) and context.stores_in_launch):
            return plain.forward(self, *args, **kwargs)
        kwargs["attention_context"] = _RotatingContext(context, kept)
        return second_forward(self, *args, **kwargs)

    return variant_of(plain, RotaryInAttention, forward)


def _second_forward(forward: types.FunctionType, kept: _Kept) -> types.FunctionType:
    """A copy of `forward` that sees `kept.keep` by the name of the library's function.

    Its names are those that its code uses. Without a `__name__` among them the compiler takes them
    for a scope of their own instead of looking them up in the library's module.
    """
    found = forward.__globals__
    names = {name: found[name] for name in _names_in([forward.__code__]) if name in found}
    names |= {"__builtins__": found["__builtins__"], _FUNCTION: kept.keep}
    copy = types.FunctionType(
        forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__
    )
    copy.__kwdefaults__ = forward.__kwdefaults__
    return copy


def _names_in(codes: Iterable[object]) -> Iterator[str]:
    for code in codes:
        if isinstance(code, types.CodeType):
            yield from code.co_names
            yield from _names_in(code.co_consts)
