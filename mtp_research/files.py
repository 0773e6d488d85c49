"""Files on disk: their hash, and writes that survive a power cut. Standard library only."""

import hashlib
import os
from pathlib import Path


def sha256_of(path: Path) -> str:
    """Hexadecimal sha256 of a file, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync_to_disk(*paths: Path) -> None:
    """Force files or folders to disk."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
