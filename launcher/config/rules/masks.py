"""What does not go with masks of pruned weights."""

from collections.abc import Iterator
from typing import Final

from launcher.config.rules import Rule, Setting


def masks(setting: Setting) -> Iterator[str]:
    """--masks, which an --init-from with masks implies."""
    if not setting.model.masks:
        return
    config = setting.config
    if setting.model.lora is not None:
        yield (
            f"--masks with --lora-rank {setting.model.lora.rank}: an adapter's product fills what "
            "was pruned: give --no-masks, or train all weights"
        )
    if config.sharding.tensor_parallel > 1:
        yield (
            f"--masks with --tensor-parallel {config.sharding.tensor_parallel}: masks are not cut "
            "by columns: use --strategy fsdp or --zero 3, or give --no-masks"
        )
    if flags := config.sharding.flags_to("nvme"):
        yield (
            f"--masks with {flags}: weights are held at zero in memory, not in DeepSpeed's swap "
            "files: offload to cpu, or give --no-masks"
        )


RULES: Final[tuple[Rule, ...]] = (masks,)
