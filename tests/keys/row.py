"""A row of the table of keys: change this key alone, and these parts of the run differ."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from mtp_research.config.rules import validate
from mtp_research.config.schema import EvalConfig, TrainConfig
from tests.keys.watch import Parts

Changes = Mapping[str, object]
Config = TypeVar("Config", TrainConfig, EvalConfig)


@dataclass(frozen=True)
class Row:
    """What one key promises, in one run."""

    key: str
    value: object  # instead of the baseline's
    run: str  # name in `lab.RUNS`
    changes: str  # parts that must differ, by name
    keeps: str = ""  # parts that must not
    base: Mapping[str, object] = field(default_factory=dict)  # other keys, in baseline and change
    shows: Callable[[Parts, Parts], object] | None = None  # true of the parts before and after
    reason: str = ""  # why no more of the key can be seen here, where that is so

    @property
    def id(self) -> str:
        """Readable name of the test case."""
        return f"{self.run}-{self.key}={str(self.value).rsplit('/', 1)[-1]}"


def fault(text: str) -> Callable[[Parts, Parts], object]:
    """The run is refused with a line that holds `text`; the baseline is not."""
    return lambda before, after: before["fault"] is None and text in str(after["fault"])


def with_keys(config: Config, changes: Changes) -> Config:
    """A checked copy with dotted keys set."""
    config = copy.deepcopy(config)
    for key, value in changes.items():
        *sections, name = key.split(".")
        holder: object = config
        for section in sections:
            holder = getattr(holder, section)
        assert hasattr(holder, name), key
        setattr(holder, name, copy.deepcopy(value))
    validate(config)
    return config
