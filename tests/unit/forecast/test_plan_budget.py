"""What a byte budget of activations comes to in each block, and that a run keeps so much."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from launcher.config.resolve import Resolved, resolve
from launcher.config.schema import RunConfig
from launcher.forecast.budget import Costs, kept_bytes, spent, within_budget
from launcher.forecast.predict import traced
from launcher.measure.live_trace import LiveTrace
from launcher.model.gpt import GPT
from launcher.util.errors import UserError

GPT2: dict[str, Any] = {
    **{"layers": 8, "d_model": 64, "heads": 4, "vocab_size": 300, "context": 32},
    "micro_batch": 2,
}
LLAMA: dict[str, Any] = {
    **{**GPT2, "position": "rope", "norm": "rms", "activation": "swiglu", "kv_heads": 2},
    **{"bias": "none", "tied": False, "d_ff": 112},
}
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": GPT2,
    "gpt2 in bf16": {**GPT2, "precision": "bf16"},
    "gpt2 with dropout": {**GPT2, "dropout": 0.1},
    "gpt2, all scores": {**GPT2, "attention": "eager"},
    "llama": LLAMA,
    "llama in bf16": {**LLAMA, "precision": "bf16"},
    "gpt2 with adapters": {**GPT2, "lora_rank": 4, "lora_targets": "mlp"},
    "llama with adapters": {**LLAMA, "precision": "bf16", "lora_rank": 4, "lora_targets": "all"},
    "llama in 4 bits": {**LLAMA, "d_ff": 128, "lora_rank": 4, "quantize_base": "nf4"},
    "llama in parts": {**LLAMA, "tensor_parallel": 2},
    "llama in parts of sequences": {**LLAMA, "context_parallel": 2},
}
COSTS = Costs(
    least=10, products={"qkv": 30, "attention": 10, "proj": 10, "mlp-up": 40}, together=90, most=150
)
FLOPS = {"qkv": 30.0, "attention": 40.0, "proj": 12.0, "mlp-up": 40.0}


def run_of(
    checkpointing: str, world_size: int = 2, device: str = "cpu", **changes: Any
) -> Resolved:
    config = RunConfig().replace(**changes, activation_checkpointing=checkpointing)
    return resolve(config, world_size=world_size, device_type=device)


def kept(run: Resolved) -> int:
    return sum(kept_bytes(traced(run)))


@pytest.mark.parametrize(
    ("model", "device", "share"),
    [
        *((model, "cpu", (0.1, 0.7)[row % 2]) for row, model in enumerate(MODELS)),
        *(("gpt2 with dropout", "cuda", 0.1), ("llama", "cuda", 0.7)),
    ],
)
def test_a_budget_is_used_and_never_exceeded(model: str, device: str, share: float) -> None:
    least, most = (kept(run_of(m, device=device, **MODELS[model])) for m in ("full", "none"))
    budget = int(least + share * (most - least)) + least // 8
    asked = run_of(f"budget={budget}B", device=device, **MODELS[model])
    run = within_budget(asked)
    used = kept(run)
    assert used <= budget, run.model.activation_checkpointing
    assert used >= budget - most / 8, run.model.activation_checkpointing
    assert run.config == asked.config  # what was asked for stays


def test_a_resume_comes_to_the_same_budget() -> None:
    asked = run_of("budget=300KiB", **MODELS["llama"])
    assert within_budget(asked) == within_budget(asked)


def test_a_deep_model_comes_within_5_percent() -> None:
    deep = {**GPT2, "layers": 48}
    least, most = (kept(run_of(mode, **deep)) for mode in ("full", "none"))
    for share in (0.3, 0.9):
        budget = int(least + share * (most - least))
        run = within_budget(run_of(f"budget={budget}B", **deep))
        assert 0.95 * budget <= kept(run) <= budget


@pytest.mark.parametrize("share", [0.2, 0.8])
def test_a_run_keeps_what_was_planned(share: float) -> None:
    """Bytes that are alive after a real forward, against those of blocks that keep little."""

    def alive(run: Resolved) -> int:
        model = GPT(run.model)
        tokens: Tensor = torch.zeros(2, 32, dtype=torch.int64)
        with LiveTrace() as trace:
            loss = model(tokens, tokens)
            found = trace.current_bytes
        del loss
        return found

    full = run_of("full", 1, **GPT2)
    least, most = kept(full), kept(run_of("none", 1, **GPT2))
    budget = int(least + share * (most - least))
    run = within_budget(run_of(f"budget={budget}B", 1, **GPT2))
    assert alive(run) - alive(full) == kept(run) - least


def test_the_most_flops_for_a_byte_come_first_and_the_last_blocks_keep_most() -> None:
    assert spent(40, 4, COSTS, FLOPS) == 4 * ["full"]
    assert spent(40 + 25, 4, COSTS, FLOPS) == [*2 * ["full"], *2 * ["keep=attention"]]
    # Attention, 4 FLOPs for a byte, in all; then proj with 1.2; qkv and mlp-up have 1.
    assert spent(80 + 20, 4, COSTS, FLOPS) == [
        *2 * ["keep=attention"],
        *2 * ["keep=attention,proj"],
    ]
    assert spent(120 + 4 * 30 + 50, 4, COSTS, FLOPS) == [
        *3 * ["keep=qkv,attention,proj"],
        "selective",
    ]
    assert spent(400 + 99, 4, COSTS, FLOPS) == ["selective", "selective", "selective", "none"]
    assert spent(600, 4, COSTS, FLOPS) == 4 * ["none"]


def test_less_than_the_least_is_refused_with_the_least() -> None:
    least = kept(run_of("full", **GPT2))
    with pytest.raises(UserError, match=rf"8 blocks .* budget={least}B, or a smaller"):
        within_budget(run_of(f"budget={least - 1}B", **GPT2))
    run = within_budget(run_of(f"budget={least}B", **GPT2))
    assert run.model.activation_checkpointing == "full"


def test_a_choice_that_was_made_can_be_given() -> None:
    made = within_budget(run_of("budget=768KiB", **GPT2))
    given = run_of(made.model.activation_checkpointing, **GPT2)
    assert "/" in made.model.activation_checkpointing
    assert given.model == made.model
    assert dataclasses.replace(given, config=made.config) == made
