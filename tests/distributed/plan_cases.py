"""Which runs are predicted and really allocated, in a group that is only pretended."""

from pathlib import Path

_BF16 = "--precision=bf16"
_LLAMA = (
    *("--kv-heads=2", "--position=rope", "--norm=rms", "--activation=swiglu", "--d-ff=96"),
    *("--bias=none", "--tied=False"),
)

BUCKET = f"--deepspeed={Path(__file__).with_name('bucket-3000.json')}"
SUB_GROUPS = f"--deepspeed={Path(__file__).with_name('sub-groups.json')}"

CASES: dict[str, tuple[str, ...]] = {
    "ddp": ("--strategy=ddp",),
    "ddp-bf16": ("--strategy=ddp", _BF16, "--activation-checkpointing=full"),
    "fsdp": ("--strategy=fsdp",),
    "fsdp-bf16": ("--strategy=fsdp", _BF16, "--tied=False"),
    "fsdp-grad-op": ("--strategy=fsdp", "--no-reshard-after-forward"),
    "fsdp-hybrid": ("--strategy=fsdp", "--replicate=2", "--reduce-each-micro-batch"),
    "fsdp-hybrid-grad-op": ("--strategy=fsdp", "--replicate=2", "--no-reshard-after-forward"),
    "fsdp-hybrid-grad-op-bf16": (
        *("--strategy=fsdp", "--replicate=2", "--no-reshard-after-forward"),
        "--reduce-each-micro-batch",
        _BF16,
    ),
    "fsdp-sgd": ("--strategy=fsdp", "--optimizer=sgd"),
    "fsdp-offload": ("--strategy=fsdp", "--offload-param=cpu", _BF16),
    "zero0": ("--zero=0",),
    "zero1": ("--zero=1",),
    "zero1-bf16": ("--zero=1", _BF16),
    "zero1-offload": ("--zero=1", "--offload-optimizer=cpu"),
    "zero2": ("--zero=2",),
    "zero2-bf16": ("--zero=2", _BF16),
    "zero2-offload": ("--zero=2", "--offload-optimizer=cpu", _BF16),
    "zero3": ("--zero=3",),
    "zero3-bf16": ("--zero=3", _BF16, "--activation-checkpointing=full"),
    "zero3-bf16-grads": ("--zero=3", _BF16, "--grad-accum-dtype=bf16"),
    "zero3-sub-groups": ("--zero=3", SUB_GROUPS),
    "fsdp-llama": ("--strategy=fsdp", *_LLAMA),
    "zero2-llama-bf16": ("--zero=2", _BF16, "--activation-checkpointing=selective", *_LLAMA),
    "zero3-llama": ("--zero=3", "--qk-norm=True", *_LLAMA),
    "zero3-offload": ("--zero=3", "--offload-optimizer=cpu", "--offload-param=cpu"),
    "fsdp-tiles-bf16": ("--strategy=fsdp", _BF16, "--mlp-tile=24"),
    "zero3-tiles": ("--zero=3", "--activation-checkpointing=full", "--mlp-tile=24"),
    "zero3-tiles-bucket": ("--zero=3", BUCKET, "--mlp-tile=24"),
    "fsdp-sequence": ("--strategy=fsdp", "--context-parallel=4"),
    "zero2-llama-sequence": ("--zero=2", _BF16, "--context-parallel=2", *_LLAMA),
    "ddp-masks": ("--strategy=ddp", "--masks"),
    "fsdp-masks-bf16": ("--strategy=fsdp", "--masks", _BF16),
    "zero3-masks-bf16": ("--zero=3", "--masks", _BF16),
    "ddp-ring": ("--strategy=ddp", "--context-parallel=8"),  # 4 heads
}
# Where states do not divide, DeepSpeed pads; eight ranks divide everything here.
SIZES: dict[int, tuple[str, ...]] = {
    8: tuple(CASES),
    64: ("ddp", "fsdp", "fsdp-bf16", "zero2"),
    512: ("ddp", "fsdp", "fsdp-hybrid", "zero3"),
}
