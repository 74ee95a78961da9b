"""The console script: ``jaxpar train ...`` is ``python -m jaxpar.train ...``."""

from __future__ import annotations

import difflib
import runpy
import sys

COMMANDS = {
    "train": "train a decoder on any data x model mesh",
    "eval": "loss of a checkpoint over held-out text",
    "sample": "continue a text with a checkpoint",
    "checkpoint": "list, verify, compare and convert checkpoints",
    "bench": "measure the step of a config",
}


def main() -> int:
    """Run the command named by the first argument; exits 2 on an unknown one, naming the nearest."""
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in ("-h", "--help"):
        print("usage: jaxpar COMMAND [FLAGS]\n")
        print("\n".join(f"  {command:8} {what}" for command, what in COMMANDS.items()))
        print("\njaxpar COMMAND --help lists its flags.")
        return 0
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, 1)
        hint = f"; did you mean {near[0]}?" if near else f"; there are {', '.join(COMMANDS)}"
        print(f"error: unknown command {name}{hint}", file=sys.stderr)
        return 2
    sys.argv = [f"jaxpar {name}", *sys.argv[2:]]
    runpy.run_module(f"jaxpar.{name}", run_name="__main__", alter_sys=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
