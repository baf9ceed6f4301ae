"""Libraries of CUDA that the null GPU lacks, told by the errors that torch raises there."""

import re

_RECURRENT = "cuDNN's recurrent networks or CTC loss"
# torch's words. The real library is loaded, and finds no driver that it can work with.
_ERRORS = {
    "cuSOLVER": r"CUSOLVER_STATUS_|cusolverDnCreate",
    "cuFFT": r"CUFFT_",
    "cuSPARSE": r"CUSPARSE_STATUS_|\bcusparse\w+\(",
    _RECURRENT: r"CUDNN_STATUS_NOT_SUPPORTED",
    # pynvml's words, of power, utilisation and temperature
    "a reading of NVML": r"NVMLError_NotSupported",
    # as for the allocator cudaMallocAsync, or symmetric memory; the null GPU has named the function
    "a function of CUDA": r"CUDA (driver )?error: operation not supported",
}

INSTEAD = {
    _RECURRENT: "torch.backends.cudnn.enabled = False, for torch's own kernels: their activations "
    "and workspaces differ from cuDNN's, those of convolutions too"
}
"""Library -> what a program can set to be rehearsed without it."""


def lacking_library(error: str) -> str | None:
    """Return the library whose absence has caused an error; None for an error of the program's."""
    return next((name for name, words in _ERRORS.items() if re.search(words, error)), None)
