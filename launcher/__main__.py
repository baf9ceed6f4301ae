"""The command line: `python -m launcher VERB`. Only dispatch lives here."""

import importlib
import sys
from pathlib import Path

from launcher.startup import importing, reader_may_leave
from launcher.verbs import VERBS


def main() -> None:
    """Dispatch to a verb's `main`; only that verb's modules are imported."""
    if Path(sys.argv[0]).name == "memscale":
        print("shardscale: memscale is its old name, which goes with 0.3", file=sys.stderr)
    verb, arguments = (sys.argv[1] if len(sys.argv) > 1 else "--help"), sys.argv[2:]
    if verb in ("-h", "--help"):
        print(usage())
        return
    if verb in ("-V", "--version"):
        print(importlib.import_module("launcher.version").line())
        return
    if verb not in VERBS:
        print(f"shardscale: unknown verb {verb!r}: use {', '.join(VERBS)}", file=sys.stderr)
        sys.exit(2)
    if verb == "train":
        importlib.import_module("launcher.config.arguments").print_help_if_asked(arguments)
    with reader_may_leave():
        with importing():
            module = importlib.import_module(VERBS[verb][0])
        code = module.main(arguments)
    sys.exit(code)


def usage() -> str:
    """What `--help` prints."""
    lines = [
        "usage: shardscale VERB [arguments]      (also: python -m launcher VERB)",
        "",
        *(f"  {verb:10} {what}" for verb, (_, what) in VERBS.items()),
        "",
        "shardscale VERB --help says more, shardscale --version what it is. On several GPUs:",
        "",
        "  torchrun --nproc 4 -m launcher.train --zero 2",
        "  shardscale run --nproc 4 -m launcher.train --zero 2      (the same)",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
