"""`shardscale export`: write a checkpoint for other programs."""

from collections.abc import Sequence

import tyro

from launcher.tools.exchange.export import (
    ExportOptions,
    Write,
    check_options,
    export,
    write_weights_alone,
)
from launcher.util.errors import ExitCode, refusing
from launcher.util.flags import fields_of, one_sentence


@refusing
def main(argv: Sequence[str]) -> int:
    """Export one checkpoint; 0 when it is there, 2 when refused."""
    with one_sentence():
        options = tyro.cli(ExportOptions, args=list(argv), prog="shardscale export")
    check_options(options, fields_of(argv))
    print(export(options, _writer(options)))
    return ExitCode.DONE


def _writer(options: ExportOptions) -> Write:
    if options.format not in ("onnx", "tensorrt"):
        return write_weights_alone
    # Graphs and engines are another tool's; nothing else here needs it.
    from launcher.tools.serve.export import write_onnx, write_tensorrt

    return write_onnx if options.format == "onnx" else write_tensorrt
