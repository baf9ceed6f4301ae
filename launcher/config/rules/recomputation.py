"""What of `--activation-checkpointing` runs where."""

from collections.abc import Iterator
from typing import Final

from launcher.config.rules import Rule, Setting
from launcher.model.checkpointing import kept_products


def activation_offload(setting: Setting) -> Iterator[str]:
    """--activation-checkpointing offload."""
    chosen = setting.config.model.activation_checkpointing
    if chosen == "offload" and setting.device_type == "cpu":
        yield (
            "--activation-checkpointing offload moves activations from a GPU to host memory, and "
            "has no effect on a CPU: use full"
        )


def products(setting: Setting) -> Iterator[str]:
    """--activation-checkpointing keep=PRODUCTS and budget=SIZE."""
    config, chosen = setting.config, setting.model.checkpointing
    text = f"--activation-checkpointing {chosen.text}"
    listed = {name for word in chosen.pattern if "=" in word for name in kept_products(word)}
    budget = chosen.budget_bytes is not None
    if "attention" in listed and setting.model.dropout and setting.model.attention != "eager":
        yield (
            f"{text} with --dropout {setting.model.dropout}: a fused kernel that draws numbers is "
            "always recomputed: leave attention out of the list, or give --attention eager"
        )
    if (listed or budget) and config.optim.precision == "fp8":
        yield f"{text} with --precision fp8: its products cannot be told apart: use full or every=2"
    if "mlp-up" in listed and config.model.mlp_tile is not None:
        yield (
            f"{text} with --mlp-tile {config.model.mlp_tile}: tiles recompute mlp-up themselves: "
            "leave one of them out"
        )
    if budget and config.model.mlp_tile is not None:
        yield (
            f"{text} with --mlp-tile {config.model.mlp_tile}: a budget weighs the whole MLP's "
            "product: use keep=qkv,attention or every=2 beside tiles"
        )
    if budget and config.loop.compile:
        yield (
            f"{text} with --compile: the compiler decides what is kept beside the products, and "
            "nobody knows its bytes: use keep=qkv,attention,proj or every=2"
        )


RULES: Final[tuple[Rule, ...]] = (activation_offload, products)
