"""A grammar small enough to check by eye: a finite automaton over token ids."""

from dataclasses import dataclass, field

from torch import Tensor

from mtp_research.decode.sampling.grammar import BITS_PER_WORD

TERMINATED = -1


@dataclass
class ToyMatcher:
    """See `grammar.Matcher`; `history` ends with the current state."""

    moves: dict[int, dict[int, int]]
    history: list[int] = field(default_factory=lambda: [0])

    @property
    def is_terminated(self) -> bool:
        return self.history[-1] == TERMINATED

    def fill_bitmask(self, bitmask: Tensor, *, row: int) -> None:
        assert not self.is_terminated, "asked for a mask after the end"
        words = [0] * bitmask.shape[-1]
        for token_id in self.moves.get(self.history[-1], {}):
            words[token_id // BITS_PER_WORD] |= 1 << token_id % BITS_PER_WORD
        for index, word in enumerate(words):
            bitmask[row, index] = word - (1 << 32) if word >> 31 else word

    def accept_token(self, token_id: int) -> bool:
        following = self.moves.get(self.history[-1], {})
        if token_id not in following:
            return False
        self.history.append(following[token_id])
        return True

    def rollback(self, num_tokens: int) -> None:
        assert num_tokens < len(self.history), "rolled back beyond the start"
        del self.history[len(self.history) - num_tokens :]


@dataclass(frozen=True)
class ToyGrammar:
    """Automaton from state 0; a state's `stop` says whether the output may end there."""

    edges: tuple[tuple[int, int, int], ...]  # (state, token id, next state)
    stops: tuple[int, ...] = ()

    def start(self, *, stop_token_ids: tuple[int, ...]) -> ToyMatcher:
        moves: dict[int, dict[int, int]] = {}
        for state, token_id, following in self.edges:
            moves.setdefault(state, {})[token_id] = following
        for state in self.stops:
            moves.setdefault(state, {}).update(dict.fromkeys(stop_token_ids, TERMINATED))
        return ToyMatcher(moves)


# Pairs "one of 10..19, then one of 60..69 or 127", as many as wanted, then a stop token.
PAIRS = ToyGrammar(
    edges=(
        *((0, token, 1) for token in range(10, 20)),
        *((1, token, 0) for token in (*range(60, 70), 127)),
    ),
    stops=(0,),
)
# Exactly 40, 41, 42 and a stop token.
WORD = ToyGrammar(edges=((0, 40, 1), (1, 41, 2), (2, 42, 3)), stops=(3,))
NOTHING = ToyGrammar(edges=())
