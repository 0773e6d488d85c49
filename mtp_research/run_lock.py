"""One run a folder; only the standard library, so that a second run is refused before it starts."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mtp_research.runtime.errors import ConfigError, EnvironmentFault

LOCK_FILE = ".lock"


@contextmanager
def run_lock(root: Path) -> Iterator[None]:
    """Hold the run folder; the kernel lets go when the process ends, however it ends.

    Args:
        root: created if it is missing.

    Raises:
        ConfigError: another process holds it.
        EnvironmentFault: it cannot be created or written.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
        lock = (root / LOCK_FILE).open("a+")
    except OSError as fault:
        raise EnvironmentFault(
            f"output_dir must be a writable folder, got {root} ({fault.strerror}); "
            "set output_dir=PATH."
        ) from fault
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as fault:
            raise ConfigError(
                f"output_dir {str(root)!r} is in use by another run; set output_dir=FOLDER."
            ) from fault
        yield
