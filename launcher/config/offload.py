"""The section of the config that says how states that live elsewhere are moved."""

from dataclasses import dataclass
from pathlib import Path

from launcher.flags import flag, require_positive
from launcher.sizes import parse_bytes

MOST_REQUESTS = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class OffloadChoice:
    """How offloaded states are moved; --offload-optimizer and --offload-param say which are."""

    pin_memory: bool = True
    """Offload from a GPU: page-lock host memory; copies are faster, and it cannot be paged out."""
    nvme_path: Path | None = None
    """Folder on a local NVMe disk for --offload-optimizer nvme and --offload-param nvme; swap
    files go into folders of their own there, which are removed at the end."""
    nvme_buffer: str = "64MiB"
    """NVMe: optimizer states updated at a time; each rank page-locks several such buffers."""
    nvme_block: str = "1MiB"
    """NVMe: bytes per I/O request; what is smaller stays in host memory."""
    nvme_queue_depth: int = 32
    """NVMe: I/O requests in flight per thread."""
    nvme_threads: int = 1
    """NVMe: threads per rank that share a read or a write."""
    nvme_overlap: bool = False
    """NVMe: read the next and write the last buffer of optimizer states while one is updated;
    takes 11 buffers instead of 4."""

    def __post_init__(self) -> None:
        require_positive(self, "nvme_queue_depth", "nvme_threads", most=MOST_REQUESTS)
        for name in ("nvme_buffer", "nvme_block"):
            parse_bytes(getattr(self, name), flag(name))
