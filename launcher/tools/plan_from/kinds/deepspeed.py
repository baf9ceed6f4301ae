"""DeepSpeed's JSON."""

from launcher.tools.plan_from.keys import Kind
from launcher.tools.plan_from.kinds.shared import DEEPSPEED_KEYS

_OFFLOAD = {"zero_optimization.offload_optimizer.device": "cpu"}
DEEPSPEED = Kind(
    name="DeepSpeed JSON",
    engine="deepspeed",
    marks=(
        "zero_optimization.stage train_micro_batch_size_per_gpu train_batch_size bf16.enabled "
        "fp16.enabled"
    ),
    keys=DEEPSPEED_KEYS,
    micro_batch="train_micro_batch_size_per_gpu",
    accumulation="gradient_accumulation_steps",
    changes=(
        ("shards gradients, too", {"zero_optimization.stage": 2}),
        ("shards parameters, too", {"zero_optimization.stage": 3}),
        ("moves optimizer states to the host", _OFFLOAD),
        (
            "moves parameters to the host, too",
            _OFFLOAD
            | {"zero_optimization.stage": 3, "zero_optimization.offload_param.device": "cpu"},
        ),
    ),
)
