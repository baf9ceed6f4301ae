"""`launcher.train` on CPUs whose ranks take the stub's GPUs for their own.

Only the answer to "which GPU does this rank compute on" comes from here, since there is no CUDA
device to ask: $NVML_STUB_UUIDS names one GPU for each local rank.
"""

import os
from unittest import mock

import torch

from launcher import train


def gpu_of_this_rank(_: torch.device) -> str | None:
    return os.environ["NVML_STUB_UUIDS"].split(",")[int(os.environ.get("LOCAL_RANK", "0"))]


if __name__ == "__main__":
    with mock.patch("launcher.run.session.resolve_uuid", gpu_of_this_rank):
        train.main()
