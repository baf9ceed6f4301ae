"""`shardscale infer-bench`: runs beside each other in PyTorch, ONNX Runtime and TensorRT."""

from collections.abc import Sequence

import tyro

from launcher.tools.serve.choice import InferBenchOptions
from launcher.util.errors import ExitCode, refusing
from launcher.util.flags import one_sentence
from launcher.util.startup import loading


@refusing
def main(argv: Sequence[str]) -> int:
    """Measure, write the folder, print the table; 0 on success, 2 when refused."""
    with one_sentence():
        options = tyro.cli(InferBenchOptions, args=list(argv), prog="shardscale infer-bench")
    with loading():
        from launcher.tools.serve.infer_bench import infer_bench

    infer_bench(options)
    return ExitCode.DONE
