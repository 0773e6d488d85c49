"""Numbers that look drawn and are a pure function of where they stand: SplitMix64's finaliser.

No generator and no state: noise of a request does not depend on its batch, nor a random weight on
the ranks that share it. Source: Steele et al., OOPSLA 2014.
"""

from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15


def signed(seed: int) -> int:
    """The lowest 64 bits as the int64 that torch takes."""
    seed &= (1 << 64) - 1
    return seed - (1 << 64) if seed >> 63 else seed


def mix(state: Tensor) -> Tensor:
    """Mix int64 numbers: each bit of a result depends on all bits of its number."""
    state = (state ^ shift_right(state, 30)) * signed(0xBF58476D1CE4E5B9)
    state = (state ^ shift_right(state, 27)) * signed(0x94D049BB133111EB)
    return state ^ shift_right(state, 31)


def shift_right(state: Tensor, bits: int) -> Tensor:
    """Logical shift: torch's `>>` on int64 keeps the sign."""
    return (state >> bits) & ((1 << (64 - bits)) - 1)
