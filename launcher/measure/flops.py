"""Peak dense matmul rates of known GPUs, for MFU. An unknown GPU has none, and no MFU."""

# (part of the device name, bf16 dense TFLOP/s without sparsity), from NVIDIA's data sheets. The
# first match wins, so longer names come first.
BF16_TFLOPS = (
    ("B200", 2250.0),
    ("H200", 989.4),
    ("GH200", 989.4),
    ("H100 PCIe", 756.0),
    ("H100 NVL", 835.0),
    ("H100", 989.4),
    ("A100", 312.0),
    ("A800", 312.0),
    ("A40", 149.7),
    ("A10G", 70.0),
    ("A10", 125.0),
    ("A6000", 154.8),
    ("L40S", 362.05),
    ("L40", 181.05),
    ("L4", 121.0),
    ("RTX 4090", 165.2),
    ("RTX 3090", 71.0),
)


def peak_flops_per_s(device_name: str | None) -> float | None:
    """bf16 tensor-core FLOP/s of a GPU by its name, None when the name is not known."""
    for part, tflops in BF16_TFLOPS:
        if device_name is not None and part in device_name:
            return tflops * 1e12
    return None
