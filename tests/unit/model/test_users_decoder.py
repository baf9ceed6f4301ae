"""A user's own decoder: what is found in it, and what is refused in one sentence."""

import inspect
import json
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from examples import decoder
from launcher.config.resolve import resolve
from launcher.config.schema import RunConfig
from launcher.forecast.plan_cli import main as plan
from launcher.model.build import initial_value
from launcher.model.config import ModelConfig
from launcher.model.foreign import decoder as foreign_decoder
from launcher.model.foreign.config import ForeignConfig
from launcher.model.foreign.users import users_causal
from launcher.strategies.parameters import parameter_shapes
from launcher.util.errors import UserError

EXAMPLE = "examples.decoder:build"
HEADER = """
import torch
from torch import nn
SHARED = nn.Parameter(torch.zeros(8))
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
    def forward(self, x):
        return x + self.linear(x)
class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 20, bias=False)
    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)
class Changed(Decoder):
    def __init__(self):
        super().__init__()
        self.change()
"""
CHANGES = {
    "two lists of blocks": (
        "def change(self): self.more = nn.ModuleList([Block()])",
        "must have one nn.ModuleList of blocks, not blocks and more",
    ),
    "no list of blocks": ("def change(self): self.blocks = nn.Sequential(Block())", "not none"),
    "a tuple": (
        "def change(self): pass\n    def forward(self, t): return super().forward(t), None",
        "its forward returns a tuple: return the logits alone",
    ),
    "scaled logits": (
        "def change(self): pass\n    def forward(self, t): return 2 * super().forward(t)",
        "does more than return",
    ),
    "a head that is not the last Linear": (
        "def change(self): self.more = nn.Linear(8, 8)",
        "more than return what more computes, its last Linear by order of registration",
    ),
    "a parameter without an effect": (
        "def change(self): self.blocks[1].more = nn.Linear(8, 8)",
        "blocks.1.more.weight has no effect on its logits: use it",
    ),
    "blocks skipped at random": (  # whether or not this forward skips one
        "def change(self): pass\n    def forward(self, t):\n"
        "        import random\n        random.random()\n        return super().forward(t)",
        "its forward draws random numbers of Python: multiply by a random tensor instead of",
    ),
    "a parameter of outside": (
        "def change(self): self.blocks[0].shared = SHARED",
        "blocks.0.shared is made outside",
    ),
    "a buffer with a state": (
        "def change(self): self.register_buffer('seen', torch.zeros(1))",
        "seen is a buffer whose values checkpoints do not hold",
    ),
    "values of tensors": (
        "def change(self): pass\n"
        "    def forward(self, t): return super().forward(t if t.max() else t)",
        "cannot run on .* no tensor's values",
    ),
    "no initial values": (
        "def change(self): self.blocks[0].w = nn.Parameter(torch.zeros(8))",
        r"blocks.0 has parameters without initial values",
    ),
    "values drawn by the constructor": (  # as nanoGPT's
        "def change(self): self.apply(self._values)\n    def _values(self, module):\n"
        "        if isinstance(module, nn.Linear): nn.init.normal_(module.weight, std=0.02)",
        r"its constructor draws blocks.0.linear.weight, and values are drawn later",
    ),
    "values drawn by a method": (
        "@torch.no_grad()\n    def change(self): self.blocks[1].linear.bias.uniform_()",
        "its constructor draws blocks.1.linear.bias",
    ),
    "values that no mode is asked for": (
        "def change(self): nn.init.orthogonal_(self.blocks[0].linear.weight)",
        "its constructor draws blocks.0.linear.weight",
    ),
    "a head with a forward of its own": (
        "class Scaled(nn.Linear):\n        def forward(self, x): return 2 * super().forward(x)\n"
        "    def change(self): self.head = self.Scaled(8, 20)",
        r"its head head computes more than nn.Linear \(Scaled\): compute the rest before it",
    ),
    "no head": ("def change(self): self.head = nn.Identity()", "has no nn.Linear after"),
    "not built": ("def change(self): float(self.head.weight.sum())", "cannot be built without"),
}


def built(decoder: str, **changes: object) -> ModelConfig:
    return RunConfig().replace(decoder=decoder, **changes).model.build()


def test_its_parts_are_found_and_flags_are_fields_of_its_config() -> None:
    model = built(EXAMPLE, layers=3, d_model=32, vocab_size=50)
    assert isinstance(model, ForeignConfig)
    assert (model.layers, model.d_model, model.vocab_size, model.context) == (3, 32, 50, 128)
    assert not model.tied
    assert model.code
    shapes = parameter_shapes(model)
    assert model.parameter_count == sum(map(_size, shapes.values()))
    assert model.matmul_parameter_count == 3 * 12 * 32 * 32 + 32 * 50
    assert RunConfig().replace(decoder=EXAMPLE).model.label == "decoder"


def test_the_example_is_short() -> None:
    assert len(Path(inspect.getfile(decoder)).read_text("utf-8").splitlines()) <= 60


def test_its_modules_draw_their_own_initial_values() -> None:
    model = built(EXAMPLE, layers=2, d_model=32, vocab_size=50)
    for name, shape in parameter_shapes(model).items():
        value = initial_value(name, shape, model, seed=1, device="cpu")
        assert value.isfinite().all()
        assert "norm" in name or value.std() > 0


def test_it_is_built_without_drawing_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change = (
        "def change(self):\n        "
        "nn.init.trunc_normal_(self.embedding.weight, std=2.0)\n        "
        "nn.init.orthogonal_(self.head.weight)\n        "
        "nn.init.sparse_(self.head.weight, 0.5)\n        "
        "self.register_buffer('turn', nn.init.ones_(torch.zeros(2)), persistent=False)\n    "
        "def init_weights(self, module): pass"
    )
    text = f"{HEADER}    {change}\ndef build(config):\n    return Changed()\n"
    (tmp_path / "undrawn.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    model = built("undrawn:build")
    assert isinstance(model, ForeignConfig)
    trunc_normal = nn.init.trunc_normal_
    before = torch.get_rng_state()
    causal = users_causal(json.loads(model.document))
    assert torch.equal(torch.get_rng_state(), before)
    assert causal.get_buffer("inner.turn").tolist() == [1.0, 1.0]
    assert nn.init.trunc_normal_ is trunc_normal


def test_a_large_buffer_has_its_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign_decoder, "GIB", 64)  # above which nothing is held
    change = "def change(self): self.register_buffer('mask', torch.empty(20).fill_(3), False)"
    text = f"{HEADER}    {change}\ndef build(config):\n    return Changed()\n"
    (tmp_path / "masked.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    model = built("masked:build")
    assert isinstance(model, ForeignConfig)
    causal = foreign_decoder.skeleton(model.document, model.attention)
    assert causal.get_buffer("inner.mask").tolist() == [3.0] * 20


def test_a_parameter_that_init_weights_leaves_out_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change = (
        "def change(self): pass\n    def init_weights(self, module):\n"
        "        if isinstance(module, nn.Embedding): nn.init.normal_(module.weight)"
    )
    text = f"{HEADER}    {change}\ndef build(config):\n    return Changed()\n"
    (tmp_path / "left_out.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    model = built("left_out:build")
    drawn = partial(initial_value, config=model, seed=0, device="cpu")
    assert drawn("causal.inner.embedding.weight", (20, 8)).std() > 0
    with pytest.raises(
        UserError, match=r"^--decoder left_out:build: blocks.0.linear.\w+ has no in"
    ):
        drawn("causal.inner.blocks.0.linear.weight", (8, 8))


def test_it_writes_no_samples() -> None:
    config = RunConfig().replace(decoder=EXAMPLE, sample_every=5)
    with pytest.raises(UserError, match="--sample-every 5 needs a cache"):
        resolve(config, world_size=1, device_type="cpu")


def _size(shape: tuple[int, ...]) -> int:
    return shape[0] * (shape[1] if len(shape) > 1 else 1)


def test_it_is_planned(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--gpus 2 --gpu-memory 24GiB --strategy fsdp --micro-batch 2 --global-batch 4"
    more = "--precision bf16 --activation-checkpointing full --layers 2"
    assert plan(f"--decoder {EXAMPLE} {flags} {more}".split()) == 0
    printed = capsys.readouterr().out
    assert f"decoder: {EXAMPLE}" in printed
    assert f"-m launcher.train --decoder {EXAMPLE}" in printed


@pytest.mark.parametrize("name", CHANGES)
def test_a_wrong_one_is_one_sentence(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change, says = CHANGES[name]
    module = f"wrong_{'_'.join(name.split())}"
    text = f"{HEADER}    {change}\ndef build(config):\n    return Changed()\n"
    (tmp_path / f"{module}.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UserError, match=says) as refused:
        built(f"{module}:build")
    assert str(refused.value).startswith(f"--decoder {module}:build: ")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("module", "change", "names"),
    [
        ("same_block", "self.blocks.append(self.blocks[0])", ("blocks.2", "blocks.0")),
        ("same_weight", "self.blocks[1].more = self.embedding", ("blocks.1", "embedding")),
    ],
)
def test_blocks_that_share_parameters_are_not_sharded_one_by_one(
    module: str,
    change: str,
    names: tuple[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = f"{HEADER}    def change(self): {change}\ndef build(config):\n    return Changed()\n"
    (tmp_path / f"{module}.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    config = RunConfig().replace(decoder=f"{module}:build", micro_batch=2, seq_len=8)
    for other in ({"strategy": "ddp"}, {"zero": 3}):
        resolve(config.replace(**other), world_size=2, device_type="cuda")
    with pytest.raises(UserError, match=rf"{names[0]}\..* is {names[1]}\..*, too: use .* --zero 3"):
        resolve(config.replace(strategy="fsdp"), world_size=2, device_type="cuda")


@pytest.mark.parametrize(
    ("decoder", "changes", "says"),
    [
        ("nowhere.to_be:found", {}, "nowhere.to_be:found cannot be imported"),
        ("examples.decoder:nothing", {}, "examples.decoder:nothing cannot be imported"),
        ("other", {}, "give auto, own, transformers, or a function of your own"),
        (EXAMPLE, {"norm": "rms"}, "Config has no field norm: it has vocab_size, context"),
        (EXAMPLE, {"model": "gpt2"}, "--model gpt2 is no JSON file"),
        (EXAMPLE, {"heads": 5}, "--decoder examples.decoder:build: .*forward cannot run"),
        (EXAMPLE, {"attention": "flash"}, "--attention flash knows"),
        (EXAMPLE, {"lora_rank": 4, "random_base": True}, "--lora-rank knows"),
    ],
)
def test_what_it_does_not_take_is_refused_by_name(
    decoder: str, changes: dict[str, object], says: str
) -> None:
    with pytest.raises(UserError, match=says):
        built(decoder, **changes)
