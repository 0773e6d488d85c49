"""`python -m mtp_research COMMAND ...`: one door to every command; each has its own --help."""

import importlib
import sys
from difflib import get_close_matches

# The command -> the module and the function that it is, imported when it is asked for.
COMMANDS = {
    "train": ("mtp_research.app.commands", "train"),
    "eval": ("mtp_research.app.commands", "evaluate"),
    "report": ("mtp_research.studies.draw_report", "main"),
    "tables": ("mtp_research.studies.tables", "main"),
    "doctor": ("mtp_research.app.doctor", "main"),
    "export": ("mtp_research.heads.export", "main"),
    "regenerate": ("mtp_research.studies.regenerate", "main"),
    "trace": ("mtp_research.policy.trace", "main"),
    "audit": ("mtp_research.policy.simulate", "main"),
}


def main() -> int:
    """Run the command that the first word names; 2 when it names none."""
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    listed = f"usage: python -m mtp_research {' | '.join(COMMANDS)} [--help] ..."
    if name in ("-h", "--help"):
        sys.stdout.write(f"{listed}\n")
        return 0
    if name not in COMMANDS:
        near = "".join(f"; nearest: {word}" for word in get_close_matches(name, COMMANDS, n=1))
        sys.stderr.write(f"error: {name or 'nothing'} is not a command{near}; {listed}\n")
        return 2
    module, function = COMMANDS[name]
    sys.argv = [f"python -m mtp_research {name}", *sys.argv[2:]]
    return getattr(importlib.import_module(module), function)()


if __name__ == "__main__":
    raise SystemExit(main())
