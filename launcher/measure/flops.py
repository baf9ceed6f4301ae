"""Peak dense matmul rates of known GPUs, for MFU. An unknown GPU has none, and no MFU."""

from launcher.measure.hardware import find_gpu


def peak_flops_per_s(device_name: str | None) -> float | None:
    """bf16 tensor-core FLOP/s of a GPU by its name, None when it has none or is not known."""
    gpu = find_gpu(device_name)
    return None if gpu is None else gpu.bf16_flops_per_s
