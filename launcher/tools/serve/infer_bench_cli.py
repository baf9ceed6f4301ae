"""`shardscale infer-bench`: runs beside each other in PyTorch, ONNX Runtime and TensorRT."""

from collections.abc import Sequence

from launcher.tools.serve.choice import InferBenchOptions
from launcher.util.errors import ExitCode, refusing
from launcher.util.flags import options_of
from launcher.util.startup import loading


@refusing
def main(argv: Sequence[str]) -> int:
    """Measure, write the folder, print the table; 0 on success, 2 when refused."""
    options = options_of(InferBenchOptions, argv, "shardscale infer-bench")
    with loading():
        from launcher.tools.serve.infer_bench import infer_bench

    infer_bench(options)
    return ExitCode.DONE
