"""`shardscale export`: write a checkpoint for transformers, ONNX or TensorRT."""

from collections.abc import Sequence

from launcher.tools.exchange.choice import ExportOptions, check_options
from launcher.util.errors import ExitCode, refusing
from launcher.util.flags import fields_of, options_of
from launcher.util.startup import loading


@refusing
def main(argv: Sequence[str]) -> int:
    """Export one checkpoint; 0 on success, 2 when refused."""
    options = options_of(ExportOptions, argv, "shardscale export")
    check_options(options, fields_of(argv))
    with loading():
        from launcher.tools.exchange.export import export

    print(export(options))
    return ExitCode.DONE
