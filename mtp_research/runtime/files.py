"""Files on disk: their hash, writes that survive a power cut, and the lock of a run's folder."""

import errno
import hashlib
import os
import platform
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from mtp_research.runtime.errors import ConfigError, EnvironmentFault

if TYPE_CHECKING:
    from torch import Tensor

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

LOCK_FILE, OWNER_FILE = ".lock", ".lock-owner"


def user_cache(name: str) -> Path:
    """A folder of ours below the user's cache folder; it may not exist yet."""
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(home) / "mtp_research" / name


def require_file(path: Path, *, kind: str) -> None:
    """Raise `ConfigError` where nothing is at the path of a file that a user named."""
    if not path.exists():
        raise ConfigError(f"there is no {kind} {path}; name one, or a folder that holds one.")


def sha256_of(path: Path) -> str:
    """Hexadecimal sha256 of a file, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_atomically(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_tensors(tensors: "Mapping[str, Tensor]", path: Path) -> None:
    """Write a safetensors file that others may read as the user's mask says."""
    from safetensors.torch import save_file

    save_file(dict(tensors), path, metadata={"format": "pt"})
    open_to_others(path)


def open_to_others(*paths: Path) -> None:
    """Let others read files as the user's mask says.

    Since 0.8 safetensors writes files that their owner alone may read, below transformers as well.
    """
    mask = os.umask(0)  # it cannot be asked for without being set
    os.umask(mask)
    for path in paths:
        path.chmod(0o666 & ~mask)


def sync_to_disk(*paths: Path) -> None:
    """Force files or folders to disk."""
    for path in paths:
        if os.name == "nt" and path.is_dir():  # Windows opens no folders
            continue
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def is_full_disk(fault: Exception) -> bool:
    """Whether a write failed for want of room; safetensors gives the system's number as text."""
    number = fault.errno if isinstance(fault, OSError) else None
    if found := re.search(r"os error (\d+)", str(fault)):
        number = int(found[1])
    return number in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)


@contextmanager
def run_lock(root: Path) -> Iterator[None]:
    """Hold the run folder, created if it is missing, so that one run at a time writes there.

    Folders that were created and stay empty, as those of a refused run, are removed.

    Raises:
        ConfigError: another process holds it.
        EnvironmentFault: it cannot be created or written.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(root / LOCK_FILE, blocking=False)
    new = []
    try:
        new = [folder for folder in (root, *root.parents) if not folder.exists()]
        root.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout as fault:
        holder = f" ({_owner(root)[:100]})" if _owner(root) else ""
        raise ConfigError(
            f"output_dir {str(root)!r} is in use by another run{holder}; set output_dir=FOLDER."
        ) from fault
    except OSError as fault:
        raise EnvironmentFault(
            f"output_dir must be a writable folder, got {root} ({fault.strerror}); "
            "set output_dir=PATH."
        ) from fault
    owner = root / OWNER_FILE
    with suppress(OSError):  # it is only told to others
        owner.write_text(_this_process(), encoding="utf8")
    try:
        yield
    finally:
        with suppress(OSError):
            owner.unlink(missing_ok=True)
            if new and list(root.iterdir()) == [root / LOCK_FILE]:
                (root / LOCK_FILE).unlink()
                for folder in new:
                    folder.rmdir()
        lock.release()


def is_held_by_others(root: Path) -> bool:
    """Whether another process holds `run_lock` of a folder; False where nobody can tell."""
    if fcntl is None or _owner(root) in ("", _this_process()):
        return False
    try:
        with (root / LOCK_FILE).open() as file:
            # Shared, for a moment: others who ask at the same time are not taken for a run.
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _this_process() -> str:
    return f"process {os.getpid()} on {platform.node()}"


def _owner(root: Path) -> str:
    """Who holds the lock, as written beside it: opening the lock file itself empties it."""
    try:
        return (root / OWNER_FILE).read_text(encoding="utf8")
    except (OSError, ValueError):
        return ""
