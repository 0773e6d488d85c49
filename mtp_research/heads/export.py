"""Write trained heads in the published names of their family.

    python -m mtp_research.heads.export --model MODEL_FOLDER --head HEAD_FOLDER --out NEW_FOLDER
    python -m mtp_research.heads.export ... --alone

Without `--alone` NEW_FOLDER is a whole checkpoint: links to the target's files and one new shard.
"""

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path

from mtp_research.errors import ConfigError, EnvironmentFault, IntegrityError
from mtp_research.heads.native_export import export_heads, stitch_heads
from mtp_research.heads.weights import load_heads
from mtp_research.models.target import load_target

# What loaders and writers call it, by what this command does.
_OPTIONS = {
    "spec.head": "--head",
    "head.path": "--head",
    "model.path": "--model",
    "out must": "--out must",
}


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    options = _parse(arguments)
    try:
        target = load_target(options.model, dtype="float32", device="cpu")
        heads = load_heads(options.head, target)
        write = export_heads if options.alone else stitch_heads
        written = write(heads, options.out, source=options.model)
    except (ConfigError, IntegrityError, EnvironmentFault) as fault:
        print(f"error: {in_own_words(str(fault))}", file=sys.stderr)
        return fault.exit_code
    print(
        f"{written.folder}: {heads.spec.num_mtp_modules} MTP modules of family "
        f"{target.family_name}, {len(written.names)} tensors, {written.names[0]} ..."
    )
    return 0


def in_own_words(message: str) -> str:
    """A message of the loaders with the options of this command for keys of the configuration."""
    for key, option in _OPTIONS.items():
        message = re.sub(rf"(?<![\w.]){re.escape(key)}(=|\b)", _option(option), message)
    return message


def _option(option: str) -> Callable[[re.Match[str]], str]:
    """`key=` becomes `--option `, and `key` alone `--option`."""
    return lambda found: f"{option} " if found[1] == "=" else option


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m mtp_research.heads.export",
        description="Write heads in the tensor names of the target's family: links to the target's "
        "files and one new shard, in bfloat16 or the dtypes of the target's own modules.",
    )
    parser.add_argument(
        "--model", type=Path, required=True, help="folder of the target in Hugging Face format"
    )
    parser.add_argument("--head", type=Path, required=True, help="RUN/head that train.py wrote")
    parser.add_argument("--out", type=Path, required=True, help="new folder, missing or empty")
    parser.add_argument("--alone", action="store_true", help="write the modules without the target")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
