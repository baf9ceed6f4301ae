"""`--cuda-graphs auto`: recorded is what was tested, where a host is slower than its GPU."""

from collections.abc import Iterator
from typing import Final

from launcher.config.compile_choice import Values, untested
from launcher.config.rules import Setting
from launcher.model.foreign.config import ForeignConfig
from launcher.util.flags import as_flags

MOST_FLOP: Final = 5e11
"""FLOPs of a micro-batch in one block, forward and backward: an H200 takes 0.6 ms, and a host that
starts an operator in 8 us as long for the 75 of a block of GPT-2."""

MOST_PARAMETERS: Final = 200_000_000
"""A recording keeps its gradients: 0.8 GB for so many, which fit where so small a model does."""

_TESTED: Final[Values] = {
    "strategy": ("single",),
    "optimizer_in_backward": None,
    "activation_checkpointing": ("none",),
    "attention": ("auto", "sdpa"),
    **dict.fromkeys(("lora_rank", "quantize_base", "masks", "mlp_tile")),
    "dropout": (None, 0.0),
    "document_attention": None,
    "compile": (False, None),
    "memory_trace": None,
}
"""Values with which a recording was tested."""


def with_cuda_graphs(setting: Setting) -> tuple[Setting, str]:
    """Choose what `--cuda-graphs auto` is, and return the reason where it is on."""
    if setting.config.loop.cuda_graphs is not None:
        return setting, ""
    pays = (
        setting.device_type == "cuda"
        and not any(untested_with_graphs(setting))
        and setting.model.parameter_count <= MOST_PARAMETERS
        and _flop(setting) <= MOST_FLOP
    )
    reason = "auto: a host starts kernels of so small micro-batches later than a GPU could run them"
    return setting.changed(cuda_graphs=pays), reason if pays else ""


def untested_with_graphs(setting: Setting) -> Iterator[str]:
    """Yield each choice with which no micro-batch was recorded, as a flag."""
    if isinstance(setting.model, ForeignConfig):
        yield "a decoder of transformers"
    arithmetic = setting.config.optim.arithmetic
    if arithmetic.fp8_linears or arithmetic.computed == "fp16":
        yield as_flags({"precision": setting.config.optim.precision})
    yield from untested(setting.config, _TESTED, {})


def _flop(setting: Setting) -> int:
    products = sum(inner * outer for inner, outer in setting.model.linear_shapes)
    # a product takes 2 FLOPs forward and 4 backward
    return 6 * products * setting.config.data.micro_batch * setting.local_seq_len
