"""The command line: `python -m launcher VERB` or `memscale VERB`. No logic lives here."""

import sys

USAGE = """\
usage: memscale VERB [arguments]      (also: python -m launcher VERB)

  train    train in this process: one GPU, or the CPU
  run      start ranks, with torchrun's own arguments:
             memscale run --nproc 4 -m launcher.train --zero 2

memscale VERB --help says more. Several GPUs: torchrun --nproc 4 -m launcher.train --zero 2
"""


def main() -> None:
    """Dispatch to a verb."""
    verb, arguments = (sys.argv[1] if len(sys.argv) > 1 else "--help"), sys.argv[2:]
    if verb in ("-h", "--help"):
        print(USAGE, end="")
    elif verb == "train":
        from launcher.train import main as train

        train(arguments)
    elif verb == "run":
        from launcher.torchrun import main as run

        run(arguments)
    else:
        print(f"memscale: unknown verb {verb!r}: use train or run", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
