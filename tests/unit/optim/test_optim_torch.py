"""Every optimizer, in the engine that a run trains with, against torch's own in a plain loop.

Strategies are held against one process elsewhere. Here one process is held against somebody else:
from given weights (`--init-from`), over 20 steps of two clipped micro-batches each with warm-up and
cosine, resumed half-way by a fresh engine, all weights trained or adapters only.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import optim_references as theirs
import pytest
import torch
from torch import Tensor, nn

from launcher.checkpoint import Checkpointer
from launcher.checkpoint.pretrained.stored import open_stored
from launcher.config.resolve import Resolved, resolve
from launcher.config.schema import RunConfig
from launcher.model.gpt import GPT, initial_value
from launcher.optim.choice import learning_rate
from launcher.optim.registry import checkpointed
from launcher.parallel.world import World
from launcher.strategies.engine import Engine, LossScale, train_step
from launcher.strategies.flat_shards import PARAM
from launcher.strategies.native import NativeEngine
from launcher.strategies.parameters import trained_shapes
from launcher.train import build_engine

STEPS, HALF = 20, 10
CLIP, LR, WARM_UP = 0.5, 3e-3, 3
FIRST_SCALE = 2.0**26  # of fp16's losses: too large, so that the first steps are skipped
MODEL: dict[str, Any] = {
    **{"vocab_size": 64, "context": 16, "layers": 1, "heads": 2, "d_model": 64, "tied": False}
}
LORA = {"lora_rank": 4, "lora_alpha": 64.0, "lora_targets": "all", "lora_dropout": 0.0}
ALONE = World(rank=0, local_rank=0, size=1, local_size=1, device=torch.device("cpu"))


@dataclass(frozen=True, kw_only=True)
class Case:
    """An optimizer of ours by its flags, and somebody else's."""

    name: str
    reference: theirs.Build
    flags: dict[str, Any] = field(default_factory=dict)
    lr: float = LR
    decays: tuple[float, ...] = (0.0, 0.1)
    adapters: bool = True
    tolerance: float = 1e-6


CASES = [
    Case(name="adamw", reference=theirs.adamw),
    # Adapters are beside weights that are frozen in bf16, which autocast in a plain loop leaves.
    Case(name="bf16", reference=theirs.fused_adamw, flags={"precision": "bf16"}, adapters=False),
    Case(
        name="fp16",
        reference=theirs.fused_adamw,
        flags={"precision": "fp16"},
        decays=(0.1,),
        adapters=False,
    ),
    Case(
        name="bf16-pure",
        reference=theirs.fused_adamw,
        flags={"precision": "bf16-pure", "compensation": False},
        decays=(0.1,),
        adapters=False,
    ),
    # Held against fp32 weights, of which a compensated bf16 weight keeps 16 of 24 bits.
    Case(
        name="bf16-pure-compensated",
        reference=theirs.in_compensated_bf16,
        flags={"precision": "bf16-pure"},
        decays=(0.1,),
        adapters=False,
        tolerance=2e-3,
    ),
    Case(name="adam", reference=theirs.adam, flags={"optimizer": "adam"}),
    Case(name="sgd", reference=theirs.sgd(0.9), flags={"optimizer": "sgd"}, lr=0.1),
    Case(
        name="sgd-plain",
        reference=theirs.sgd(0.0),
        flags={"optimizer": "sgd", "momentum": 0.0},
        lr=0.1,
    ),
    Case(name="adafactor", reference=theirs.adafactor, flags={"optimizer": "adafactor"}, lr=3e-2),
    Case(name="muon", reference=theirs.muon, flags={"optimizer": "muon"}),
    Case(
        name="apollo",
        reference=theirs.apollo,
        flags={"optimizer": "apollo", "apollo_rank": theirs.APOLLO_RANK},
        adapters=False,  # refused: their gradients have a low rank already
    ),
    # A moment that lies between two of bf16 may be rounded to the other one.
    Case(
        name="bf16-moments",
        reference=theirs.in_bf16,
        flags={"moments_dtype": "bf16"},
        tolerance=5e-6,
    ),
    # With another number of threads sums round otherwise, and a byte of a moment with them.
    Case(
        name="adamw8bit",
        reference=theirs.in_8_bits,
        flags={"optimizer": "adamw8bit"},
        tolerance=5e-6,
    ),
    # It scales by the largest magnitude without a sign, and rounds small second moments to 0.
    Case(
        name="adamw8bit-bitsandbytes",
        reference=theirs.bitsandbytes_adamw,
        flags={"optimizer": "adamw8bit"},
        adapters=False,
        tolerance=5e-5,
    ),
    # Epsilons have other places, and decay is relative to the weights' root mean square.
    Case(
        name="adafactor-transformers",
        reference=theirs.transformers_adafactor,
        flags={"optimizer": "adafactor"},
        lr=3e-2,
        decays=(0.0,),
        adapters=False,
        tolerance=1e-5,
    ),
]


def resolved_of(case: Case, decay: float, given: Path, adapters: bool) -> Resolved:
    config = RunConfig().replace(
        **MODEL,
        **(LORA if adapters else {}),
        **{
            "init_from": given,
            "strategy": "single",
            **({} if case.name.startswith("sgd") else {"betas": theirs.BETAS}),
            "eps": theirs.EPS,
            "clip": CLIP,
        },
        **{"lr": case.lr, "warmup_steps": WARM_UP, "weight_decay": decay, "steps": STEPS},
        **{"schedule": "cosine", "min_lr_ratio": 0.1},  # what --init-from chooses is another
        **{"micro_batch": 4, "global_batch": 8, "tokenizer": "byte"},
        **case.flags,
    )
    return resolve(config, world_size=1, device_type="cpu")


def batches() -> Iterator[list[tuple[Tensor, Tensor]]]:
    """The micro-batches of each step."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        rows = torch.randint(64, (2, 4, 17), generator=generator)
        yield [(part[:, :-1].contiguous(), part[:, 1:].contiguous()) for part in rows]


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights that nothing here draws: biases are not 0, norms not 1."""
    folder = tmp_path_factory.mktemp("given")
    torch.manual_seed(5)
    model = GPT(resolved_of(CASES[0], 0.0, folder, False).model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.1 + (parameter.dim() == 1))
    engine = NativeEngine(
        model,
        torch.optim.AdamW(model.parameters(), fused=True),
        accumulation=1,
        clip=0.0,
        device=ALONE.device,
    )
    Checkpointer(folder / "checkpoints").save(3, engine, {"model": model.config})
    return folder


def in_a_plain_loop(case: Case, resolved: Resolved, given: Path, decay: float) -> list[float]:
    """Losses of somebody else's optimizer."""
    model = GPT(resolved.model)
    with open_stored(given) as weights, torch.no_grad():
        for name, parameter in model.named_parameters():
            if weights.has(name):
                parameter.copy_(weights.read(name))
            else:
                shape = tuple(parameter.shape)
                parameter.copy_(initial_value(name, shape, resolved.model, seed=0, device="cpu"))
    precision = case.flags.get("precision", "fp32")
    if precision == "bf16-pure":
        model = model.bfloat16()
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    optimizers = case.reference(trained, decay)
    scaler = torch.amp.GradScaler("cpu", FIRST_SCALE, enabled=precision == "fp16")
    low = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    losses = []
    for step, micro_batches in enumerate(batches(), start=1):
        done = (step - WARM_UP) / (STEPS - WARM_UP)
        lr = case.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))
        lr = case.lr * step / WARM_UP if step <= WARM_UP else lr
        losses.append(0.0)
        for tokens, targets in micro_batches:
            with torch.autocast("cpu", low, enabled=low is not None):
                loss = model(tokens, targets) / len(micro_batches)
            scaler.scale(loss).backward()
            losses[-1] += loss.item()
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(trained.values(), CLIP)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr
            scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update()
    assert precision != "fp16" or scaler.get_scale() < FIRST_SCALE, "no step was skipped"
    return losses


def trained_on(engine: Engine, resolved: Resolved, first: int, last: int) -> list[float]:
    losses = []
    for step, micro_batches in enumerate(batches(), start=1):
        if first <= step <= last:
            lr = learning_rate(step, resolved.config.optim, resolved.steps)
            losses.append(train_step(engine, micro_batches, lr)[0].item())
    return losses


def begun(resolved: Resolved, given: Path, folder: Path, *, trained: bool = True) -> Engine:
    engine = build_engine(resolved, ALONE)
    engine.set_loss_scale(LossScale(scale=FIRST_SCALE, good_steps=0))
    with open_stored(given) as weights:
        Checkpointer(folder).begin_with(weights, engine, trained=trained)
    return engine


@pytest.mark.parametrize(
    ("case", "decay", "adapters"),
    [
        pytest.param(
            case, decay, adapters, id=f"{case.name}-{decay}-{'lora' if adapters else 'all'}"
        )
        for case in CASES
        for decay in case.decays
        for adapters in ((False, True) if case.adapters else (False,))
    ],
)
def test_trains_as_in_a_plain_loop(
    case: Case, decay: float, adapters: bool, given: Path, tmp_path: Path
) -> None:
    resolved = resolved_of(case, decay, given, adapters)
    expected = in_a_plain_loop(case, resolved, given, decay)
    assert expected[-1] < 0.99 * expected[0]
    engine = begun(resolved, given, tmp_path)
    losses = trained_on(engine, resolved, 1, HALF)
    Checkpointer(tmp_path).save(HALF, engine, {"model": resolved.model})

    scale = engine.loss_scale()
    engine = begun(resolved, given, tmp_path, trained=False)
    if scale is not None:
        engine.set_loss_scale(scale)
    loaded, _ = Checkpointer(tmp_path).load(tmp_path, engine)
    losses += trained_on(engine, resolved, HALF + 1, STEPS)
    assert losses == pytest.approx(expected, rel=case.tolerance)
    # As the command that resumes it compares them.
    shapes = trained_shapes(resolved.model)
    states, counters = checkpointed(resolved.config.optim, shapes)
    loaded.check_model(shapes, (PARAM, *states), counters)
    assert loaded.missing_state() is None
