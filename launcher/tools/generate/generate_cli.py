"""`shardscale generate`: continue prompts with a trained model."""

from collections.abc import Sequence

from launcher.tools.generate.choice import GenerateOptions
from launcher.util.errors import ExitCode, refusing
from launcher.util.flags import options_of
from launcher.util.startup import loading


@refusing
def main(argv: Sequence[str]) -> int:
    """Write the continuations; 0 on success, 2 when refused."""
    options = options_of(GenerateOptions, argv, "shardscale generate")
    with loading():
        from launcher.tools.generate.generate import generate

    try:
        generate(options)
    except KeyboardInterrupt:
        print()  # the message that follows starts on a new line
        raise
    return ExitCode.DONE
