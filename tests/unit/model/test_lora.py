"""Low-rank adapters: what they compute, what is trained, what is saved, and PEFT's format."""

import dataclasses
import json
import math
import os
import shlex
from pathlib import Path
from typing import Any

import harness
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from launcher.checkpoint import Checkpoint
from launcher.checkpoint.pretrained.loading import build, open_source
from launcher.checkpoint.pretrained.stored import CheckpointWeights, check_stays, open_stored
from launcher.checkpoint.pretrained.transformed import Merged
from launcher.config.model import ModelChoice, adapter_flags
from launcher.config.resolve import resolve
from launcher.config.schema import RunConfig
from launcher.model.config import ModelConfig
from launcher.model.gpt import GPT, initial_value
from launcher.model.linears import LoRALinear, is_adapter
from launcher.model.lora_config import Lora
from launcher.run.capacity import _state_bytes
from launcher.strategies.build_inputs import materialize_whole
from launcher.strategies.parameters import parameters_of, trained_shapes
from launcher.tools.exchange import export_cli, import_cli
from launcher.tools.generate import generate_cli as generate
from launcher.util.errors import UserError
from launcher.util.files import FolderLock

SHAPE: dict[str, Any] = {"vocab_size": 257, "context": 32, "layers": 2, "heads": 4, "d_model": 32}
LLAMA = {
    **SHAPE,
    **{"kv_heads": 2, "d_ff": 48, "position": "rope", "norm": "rms", "activation": "swiglu"},
    **{"bias": "none", "tied": False},
}
LORA = Lora(rank=4, alpha=16.0, targets=("qkv", "proj", "mlp"))


def drawn(config: ModelConfig, *, seed: int = 0, b_std: float = 0.0) -> GPT:
    """A model with its initial values; `b_std` for adapters that do something already."""
    with torch.device("meta"):
        model = GPT(config)

    def value(name: str, shape: torch.Size) -> Tensor:
        if name.endswith("lora_b") and b_std:
            generator = torch.Generator().manual_seed(math.prod(shape) + len(name))
            return torch.empty(shape).normal_(std=b_std, generator=generator)
        return initial_value(name, shape, config, seed=seed, device="cpu")

    materialize_whole(model, value, device=torch.device("cpu"), dtype=torch.float32)
    return model


def test_each_part_of_a_matrix_has_an_adapter_of_its_own() -> None:
    torch.manual_seed(0)
    lora = Lora(rank=3, alpha=5.0, rslora=True)
    linear = LoRALinear(8, (6, 2, 4), bias=True, lora=lora)
    torch.nn.init.normal_(linear.lora_a)
    torch.nn.init.normal_(linear.lora_b)
    x = torch.randn(7, 8)
    expected = F.linear(x, linear.weight, linear.bias)
    rows = 0
    for number, size in enumerate((6, 2, 4)):
        a = linear.lora_a[3 * number : 3 * number + 3]
        b = linear.lora_b[rows : rows + size]
        expected[:, rows : rows + size] += 5 / math.sqrt(3) * (x @ a.t() @ b.t())
        rows += size
    torch.testing.assert_close(linear(x), expected)


@pytest.mark.parametrize("shape", [SHAPE, LLAMA], ids=["gpt2", "llama"])
@pytest.mark.parametrize("targets", [("qkv",), ("proj", "mlp"), ("qkv", "proj", "mlp")], ids=str)
def test_only_adapters_are_trained_and_counted(shape: Any, targets: Any) -> None:
    config = ModelConfig(**shape, lora=Lora(rank=4, alpha=8, targets=targets))
    model = drawn(config)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {name for name, _ in model.named_parameters() if is_adapter(name)}
    assert trained == set(trained_shapes(config))
    elements = {p.name: p.elements for p in parameters_of(config)}
    assert sum(elements[name] for name in trained) == config.trained_parameter_count
    assert sum(elements.values()) == config.parameter_count
    # R rows and columns: nothing else depends on the rank.
    assert config.lora is not None
    twice = dataclasses.replace(config, lora=dataclasses.replace(config.lora, rank=8))
    assert twice.trained_parameter_count == 2 * config.trained_parameter_count


@pytest.mark.parametrize("rank", [LORA.rank, 16])
@pytest.mark.parametrize("mode", ["selective", "full", "every=2", "keep=qkv", "keep=proj,mlp-up"])
def test_recomputation_changes_no_gradient(mode: str, rank: int) -> None:
    config = ModelConfig(**LLAMA, lora=dataclasses.replace(LORA, rank=rank))
    tokens = torch.randint(257, (2, 32), generator=torch.Generator().manual_seed(0))
    gradients = []
    for checkpointing in ("none", mode):
        changed = dataclasses.replace(config, activation_checkpointing=checkpointing)
        model = drawn(changed, b_std=0.1)
        model(tokens, tokens).backward()
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.requires_grad})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-5, atol=1e-7)


class Trainer:
    """Steps of a new optimizer on batches that follow from their numbers."""

    def __init__(self, model: nn.Module, optimizer: Any, lr: float) -> None:
        self.model = model
        self.optimizer: torch.optim.Optimizer = optimizer(
            [p for p in model.parameters() if p.requires_grad], lr=lr
        )

    def steps(self, numbers: range) -> list[float]:
        losses = []
        for number in numbers:
            generator = torch.Generator().manual_seed(number)
            tokens = torch.randint(257, (4, 33), generator=generator)
            inputs, targets = tokens[:, :-1], tokens[:, 1:]
            if isinstance(self.model, GPT):
                loss = self.model(inputs, targets)
            else:
                logits = self.model(inputs).logits
                loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses


def adapters_of(model: GPT) -> dict[str, Tensor]:
    return {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize(
    ("shape", "lora", "equal"),
    [
        (LLAMA, LORA, True),
        (LLAMA, dataclasses.replace(LORA, rslora=True), True),
        (SHAPE, dataclasses.replace(LORA, targets=("proj", "mlp")), True),
        (SHAPE, LORA, False),
    ],
    ids=["llama", "rslora", "gpt2 without qkv", "gpt2"],
)
@pytest.mark.parametrize(("optimizer", "lr"), [(torch.optim.SGD, 0.5), (torch.optim.AdamW, 3e-3)])
def test_trained_here_and_on_in_peft_and_back(
    shape: Any,
    lora: Lora,
    equal: bool,
    optimizer: Any,
    lr: float,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """3 steps here, 3 in PEFT: the losses and adapters of 6 steps here, or a line that says not.

    The optimizer begins anew with step 3, as its states stay behind; SGD has none.
    """
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    config = ModelConfig(**shape, lora=lora)
    ours = drawn(config, b_std=0.05)
    write_run(tmp_path / "plain", drawn(dataclasses.replace(config, lora=None)))
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    assert (
        export_cli.main([str(tmp_path / "plain"), "--out", str(base), "--tokenizer", "none"]) == 0
    )
    Trainer(ours, optimizer, lr).steps(range(3))
    write_run(tmp_path / "run", ours)
    capsys.readouterr()
    assert export_cli.main([str(tmp_path / "run"), "--out", str(adapter), "--adapter"]) == 0
    assert ("training on differs from PEFT's" in capsys.readouterr().out) == (not equal)
    halfway = adapters_of(ours)
    losses = Trainer(ours, optimizer, lr).steps(range(3, 6))
    theirs = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base), adapter, is_trainable=True
    )
    their_losses = Trainer(theirs, optimizer, lr).steps(range(3, 6))
    theirs.save_pretrained(str(tmp_path / "saved"))
    settings = tmp_path / "saved" / "adapter_config.json"
    document = json.loads(settings.read_text())
    settings.write_text(json.dumps({**document, "base_model_name_or_path": str(base)}))
    capsys.readouterr()
    assert import_cli.main([str(tmp_path / "saved"), "--out", str(tmp_path / "back")]) == 0
    assert ("training on differs from PEFT's" in capsys.readouterr().out) == (not equal)
    assert their_losses[0] == pytest.approx(losses[0], rel=1e-5)  # before the first step in PEFT
    if not equal:
        assert their_losses != pytest.approx(losses, rel=1e-5)
        return
    assert their_losses == pytest.approx(losses, rel=1e-5)
    with open_stored(tmp_path / "back") as stored:
        for name, expected in adapters_of(ours).items():
            moved = (expected - halfway[name]).norm()
            assert moved > 1e-3
            # Of single elements AdamW makes whole steps of a gradient's rounding.
            assert (stored.read(name) - expected).norm() < 1e-3 * moved


def write_run(folder: Path, model: GPT) -> None:
    """A checkpoint of a model as it is."""
    from launcher.checkpoint import Checkpointer
    from launcher.checkpoint.extra import Base
    from launcher.strategies.native import NativeEngine

    trained = [p for p in model.parameters() if p.requires_grad]
    engine = NativeEngine(
        model,
        torch.optim.AdamW(trained, fused=True),
        accumulation=1,
        clip=0.0,
        device=torch.device("cpu"),
    )
    extra: dict[str, Any] = {"model": model.config}
    if model.config.lora is not None:
        extra["base"] = Base(seed=0, fingerprint="seed 0 on cpu")
    Checkpointer(folder / "checkpoints").save(3, engine, extra)


@pytest.mark.parametrize("shape", [SHAPE, LLAMA], ids=["gpt2", "llama"])
def test_an_export_is_the_same_function_in_peft(shape: Any, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    config = ModelConfig(**shape, lora=LORA)
    model = drawn(config, b_std=0.1).eval()
    write_run(tmp_path / "run", model)
    write_run(tmp_path / "plain", drawn(dataclasses.replace(config, lora=None)))
    folders = {name: tmp_path / name for name in ("adapter", "merged", "base")}
    none = ("--tokenizer", "none")
    for name, source, flags in (
        ("adapter", "run", ("--adapter",)),
        ("merged", "run", ("--merge", *none)),
        ("base", "plain", none),
    ):
        assert export_cli.main([str(tmp_path / source), "--out", str(folders[name]), *flags]) == 0
    tokens = torch.randint(257, (2, 32), generator=torch.Generator().manual_seed(0))
    expected = model(tokens).detach()
    merged = AutoModelForCausalLM.from_pretrained(folders["merged"]).eval()
    torch.testing.assert_close(merged(tokens).logits, expected, rtol=1e-4, atol=1e-4)
    base = AutoModelForCausalLM.from_pretrained(folders["base"])
    theirs = PeftModel.from_pretrained(base, folders["adapter"]).eval()
    torch.testing.assert_close(theirs(tokens).logits, expected, rtol=1e-4, atol=1e-4)

    # And back again: PEFT's own file, beside the base that it names.
    theirs.save_pretrained(str(tmp_path / "saved"))
    settings = tmp_path / "saved" / "adapter_config.json"
    document = json.loads(settings.read_text())
    settings.write_text(json.dumps({**document, "base_model_name_or_path": str(folders["base"])}))
    assert import_cli.main([str(tmp_path / "saved"), "--out", str(tmp_path / "imported")]) == 0
    with open_stored(tmp_path / "imported") as stored:
        plain = Merged(stored)
        back = drawn(plain.config).eval()
        with torch.no_grad():
            for name, parameter in back.named_parameters():
                parameter.copy_(plain.read(name))
    torch.testing.assert_close(back(tokens).detach(), expected, rtol=1e-4, atol=1e-4)


def train(*arguments: str, refused: bool = False) -> str:
    """A real run; what it says to stderr."""
    done = harness.train(1, *arguments)
    assert done.returncode == (2 if refused else 0), done.stderr
    if refused:
        assert done.stderr.count("\n") == 1
    return done.stderr


FLAGS = ["--layers=1", "--d-model=32", "--heads=2", "--context=32", "--vocab-size=257"]
RUN = [
    "--tokenizer=byte",
    "--device=cpu",
    "--micro-batch=4",
    "--test-batches=1",
    "--log-level=warning",
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base run, and a run of adapters beside it."""
    folder = tmp_path_factory.mktemp("lora")
    text = folder / "text.txt"
    text.write_text("".join(f"{n} squared is {n * n}.\n" for n in range(4000)))
    common = [*RUN, f"--data={text}"]
    train(*FLAGS, *common, "--steps=4", f"--out={folder / 'base'}")
    base = f"--init-from={folder / 'base'}"
    train(base, *common, "--lora-rank=2", "--steps=4", f"--out={folder / 'run'}")
    return folder


def test_frozen_weights_are_not_saved_again(trained: Path) -> None:
    with open_stored(trained / "run") as adapted, open_stored(trained / "base") as base:
        assert adapted.checkpoint is not None
        lora = adapted.config.lora
        assert lora is not None
        assert set(adapted.checkpoint.shapes) == set(trained_shapes(adapted.config))
        assert adapted.base() == base.base() == adapted.checkpoint.extra["base"]
        for parameter in parameters_of(base.config):
            assert torch.equal(adapted.read(parameter.name), base.read(parameter.name))


def test_goes_on_with_its_own_base_only(trained: Path, tmp_path: Path) -> None:
    text = f"--data={trained / 'text.txt'}"
    common = [*RUN, text, f"--resume={trained / 'run'}", "--steps=6", "--lora-rank=2"]
    base = f"--init-from={trained / 'base'}"
    train(base, *common, f"--out={tmp_path / 'on'}")
    other = tmp_path / "other"
    train(*FLAGS, *RUN, text, "--seed=5", "--steps=1", f"--out={other}")
    wrong = f"--out={tmp_path / 'wrong'}"
    said = train(f"--init-from={other}", *common, wrong, refused=True)
    assert "trained beside the weights of" in said
    said = train(base, *common, "--lora-alpha=3", wrong, refused=True)
    assert "--lora-alpha 4.0" in said
    assert not (tmp_path / "wrong").exists()


def test_begins_with_adapters_and_trains_them_on(trained: Path, tmp_path: Path) -> None:
    """Their shape is adopted, and so is what they are beside."""
    out = tmp_path / "on"
    flags = [f"--init-from={trained / 'run'}", *RUN, f"--data={trained / 'text.txt'}"]
    train(*flags, "--steps=1", "--lr=1e-30", f"--out={out}")
    with open_stored(out) as on, open_stored(trained / "run") as before:
        assert on.config.lora == before.config.lora
        assert on.base() == before.base()
        for name in trained_shapes(on.config):
            torch.testing.assert_close(on.read(name), before.read(name))


def test_generate_takes_adapters(trained: Path) -> None:
    """Merged, which is the same function."""
    tokens = torch.arange(32)[None]
    with open_stored(trained / "run") as adapted:
        apart = drawn(adapted.config).eval()
        with torch.no_grad():
            for name, parameter in apart.named_parameters():
                parameter.copy_(adapted.read(name))
    assert apart.get_parameter("blocks.0.attn.qkv.lora_b").abs().max() > 0
    with open_source(trained / "run") as source:
        merged = build(source, device=torch.device("cpu"), dtype=torch.float32)
    torch.testing.assert_close(merged(tokens), apart(tokens).detach(), rtol=1e-4, atol=1e-5)


def test_an_adapter_beside_a_run_says_so_and_finds_its_tokenizer(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """PEFT loads no checkpoint of a run; here its tokenizer is above the checkpoint."""
    out, whole = tmp_path / "adapter", tmp_path / "whole"
    assert export_cli.main([str(trained / "run"), "--out", str(out), "--adapter"]) == 0
    note = capsys.readouterr().out.splitlines()[-1]
    named = json.loads((out / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert f"its base {named} is a run's checkpoint, which PEFT cannot load" in note
    assert generate.main([str(out), "--prompt=3 squared", "--max-tokens=2", "--device=cpu"]) == 0
    assert import_cli.main([str(out), "--out", str(tmp_path / "back")]) == 0
    assert (tmp_path / "back" / "tokenizer.json").is_file()
    command = shlex.split(note.partition("shardscale export ")[2].partition(",")[0])
    assert export_cli.main([*command[:2], str(whole)]) == 0
    train(
        *(f"--init-from={whole}", *RUN, f"--data={trained / 'text.txt'}"),
        *("--lora-rank=2", "--steps=1", f"--out={tmp_path / 'beside'}"),
    )
    capsys.readouterr()
    again = [str(tmp_path / "beside"), "--out", str(tmp_path / "again"), "--adapter"]
    assert export_cli.main(again) == 0
    assert "PEFT cannot load" not in capsys.readouterr().out


def test_adapters_beside_a_bf16_base_go_to_peft_and_back_without_loss(
    trained: Path, tmp_path: Path
) -> None:
    """They are trained in fp32, and are not rounded to the dtype of their base."""
    base, run = tmp_path / "base", tmp_path / "run"
    whole = [str(trained / "base"), "--out", str(base), "--dtype", "bf16"]
    assert export_cli.main(whole) == 0
    targets = ("--lora-rank=2", "--lora-targets=proj,mlp")  # of one matrix here as there
    data = f"--data={trained / 'text.txt'}"
    train(f"--init-from={base}", *RUN, data, *targets, "--steps=2", f"--out={run}")
    adapter, back = tmp_path / "adapter", tmp_path / "back"
    assert export_cli.main([str(run), "--out", str(adapter), "--adapter"]) == 0
    assert import_cli.main([str(adapter), "--out", str(back)]) == 0
    with open_stored(run) as before, open_stored(back) as after:
        for name in trained_shapes(before.config):
            assert torch.equal(before.read(name), after.read(name))


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_what_is_merged_is_what_adapters_were_trained_beside(
    kind: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = {**LLAMA, "d_model": 64, "d_ff": 128}
    config = ModelConfig(**shape, lora=LORA, quantize_base=kind)
    model = drawn(config, b_std=0.1).eval()
    write_run(tmp_path / "run", model)
    with open_stored(tmp_path / "run") as stored:
        plain = Merged(stored)
        assert plain.config.quantize_base == "none"
        merged = drawn(plain.config).eval()
        with torch.no_grad():
            for name, parameter in merged.named_parameters():
                parameter.copy_(plain.read(name))
    tokens = torch.arange(32)[None]
    torch.testing.assert_close(merged(tokens), model(tokens), rtol=1e-4, atol=1e-4)
    assert (
        export_cli.main([str(tmp_path / "run"), "--out", str(tmp_path / "out"), "--adapter"]) == 0
    )
    assert f"trained beside weights in {kind}" in capsys.readouterr().out


def test_the_order_of_targets_makes_no_difference() -> None:
    one, other = (ModelChoice(lora_rank=2, lora_targets=t) for t in ("mlp, proj,qkv", "all-linear"))
    assert one.build_lora() == other.build_lora()
    # as versions before have saved it
    saved = Lora(rank=2, alpha=4.0, targets=("proj", "z", "qkv", "a"))
    assert adapter_flags(saved)["lora_targets"] == "qkv,proj,a,z"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"quantize_base": "nf4"}, "--quantize-base nf4 leaves nothing to train"),
        (
            {"lora_rank": 2, "quantize_base": "int8", "d_model": 32},
            "the rows of qkv have 32",
        ),
        ({"lora_rank": 0}, "--lora-rank 0"),
        ({"lora_rank": 64}, "--lora-rank 64 is more than the 32"),
        ({"lora_rank": 2, "lora_alpha": 0.0}, "lora_alpha 0.0 must be above 0"),
        ({"lora_rank": 2, "lora_alpha": 1e300}, "--lora-alpha 1e+300 must be at most 1e+06"),
        ({"lora_rank": 2, "lora_dropout": 1.0}, "lora_dropout 1.0"),
        ({"lora_rank": 2, "lora_targets": "q"}, "lora_targets 'q'"),
        (
            {"lora_rank": 2, "lora_targets": "q_proj,up_proj"},
            "or be all. q_proj is in qkv. up_proj is in mlp.",
        ),
        ({"lora_rank": 2, "lora_targets": "qkv,qkv"}, "lora_targets 'qkv,qkv'"),
        ({"lora_alpha": 4.0}, "--lora-alpha 4.0 belongs to --lora-rank"),
        ({"lora_targets": "all"}, "--lora-targets all belongs to --lora-rank"),
        ({"rslora": True}, "--rslora belongs to --lora-rank"),
        ({"lora_rank": 2, "tensor_parallel": 2, "vocab_size": 258}, "adapters are not sharded"),
        (
            {"lora_rank": 2, "tensor_parallel": 2, "vocab_size": 258, "strategy": "fsdp"},
            "leave --tensor-parallel out, the run shards frozen weights already",
        ),
        ({"lora_rank": 2, "precision": "fp8"}, "whose Linears have no adapters"),
        ({"lora_rank": 2, "optimizer": "apollo"}, "low rank"),
        (
            {"lora_rank": 2, "zero": 3, "offload_optimizer": "nvme", "nvme_path": Path()},
            "swaps only what is trained",
        ),
    ],
    ids=str,
)
def test_refused_in_one_sentence(changes: dict[str, Any], said: str) -> None:
    shape = {name: SHAPE[name] for name in ("layers", "heads", "d_model", "context")}
    with pytest.raises(UserError) as raised:
        resolve(RunConfig().replace(**{**shape, **changes}), world_size=2, device_type="cpu")
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


def test_what_could_never_fit_is_counted_in_its_own_bytes() -> None:
    """A base of 4 bits is no base of bf16."""
    sizes = []
    for kind in ("none", "int8", "nf4"):
        changes = {"model": "llama-3.1-8b", "lora_rank": 8, "quantize_base": kind}
        config = RunConfig().replace(**changes, precision="bf16", micro_batch=1)
        run = resolve(config, world_size=1, device_type="cpu")
        sizes.append(_state_bytes(run) / run.model.parameter_count)
    assert sizes == pytest.approx([2.01, 1.16, 0.72], abs=0.02)


def adapter_of(trained: Path, out: Path) -> Path:
    assert export_cli.main([str(trained / "run"), "--out", str(out), "--adapter"]) == 0
    settings = out / "adapter_config.json"
    base = out.with_name("base-hf")
    if not base.exists():
        assert (
            export_cli.main([str(trained / "base"), "--out", str(base), "--tokenizer", "none"]) == 0
        )
    document = json.loads(settings.read_text())
    settings.write_text(json.dumps({**document, "base_model_name_or_path": str(base)}))
    return out


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"use_dora": True}, "use_dora is True"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"base_model_name_or_path": "nowhere/at-all"}, "is no folder here"),
        ({"alpha_pattern": {".*": 3}}, "is no name of a module"),
        ({"lora_alpha": 0}, "lora_alpha is 0, but must be"),
    ],
    ids=str,
)
def test_a_foreign_adapter_is_refused(
    trained: Path,
    tmp_path: Path,
    changes: dict[str, Any],
    words: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = adapter_of(trained, tmp_path / "adapter")
    settings = folder / "adapter_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), **changes}))
    capsys.readouterr()
    assert import_cli.main([str(folder), "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert words in said
    assert not (tmp_path / "out").exists()


def test_damaged_adapters_are_refused(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = adapter_of(trained, tmp_path / "adapter")
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    name = next(key for key in tensors if key.endswith("lora_A.weight"))
    for changed, words in (
        ({**tensors, "base_model.model.lm_head.lora_A.weight": torch.ones(2, 2)}, "no adapter of"),
        ({key: t for key, t in tensors.items() if key != name}, "lacks"),
        ({**tensors, name: torch.ones(2, 7)}, "the base has"),
        ({**tensors, name: tensors[name] * math.nan}, "NaN"),
    ):
        save_file(changed, path)
        capsys.readouterr()
        assert import_cli.main([str(folder), "--out", str(tmp_path / "out")]) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1
        assert words in said


@pytest.mark.parametrize(
    ("source", "flags", "words"),
    [
        ("run", [], "--merge"),
        ("run", ["--merge", "--adapter"], "give one of them"),
        ("base", ["--merge"], "has no adapters"),
        ("run", ["--adapter", "--format=safetensors"], "PEFT's format"),
    ],
)
def test_an_export_that_says_nothing_of_adapters(
    trained: Path,
    tmp_path: Path,
    source: str,
    flags: list[str],
    words: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert export_cli.main([str(trained / source), "--out", str(tmp_path / "out"), *flags]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert words in said


def test_a_base_that_is_gone_is_named(trained: Path) -> None:
    base = trained / "base"
    base.rename(trained / "elsewhere")
    try:
        with (
            pytest.raises(UserError, match=r"beside the weights in .*base.* not there any more"),
            open_stored(trained / "run"),
        ):
            pass
    finally:
        (trained / "elsewhere").rename(base)


@pytest.mark.parametrize("changes", [{"config": {"keep": 1}}, {"by_clock": True}])
def test_a_base_that_its_run_will_remove_is_rejected(trained: Path, changes: Any) -> None:
    lock = FolderLock(trained / "base")
    with open_stored(trained / "base") as base:
        assert isinstance(base, CheckpointWeights)
        assert lock.take()
        check_stays(base)  # of a living run that keeps all
        base.checkpoint = dataclasses.replace(
            base.checkpoint, extra={**base.checkpoint.extra, **changes}
        )
        with pytest.raises(UserError, match=rf"its run is alive \(process {os.getpid()} on "):
            check_stays(base)
        del lock  # its run has ended
        check_stays(base)


def test_a_changed_base_is_noticed(trained: Path) -> None:
    """Also by who only reads."""
    with open_stored(trained / "run") as adapted:
        checkpoint = adapted.checkpoint
    assert isinstance(checkpoint, Checkpoint)
    index = Path(checkpoint.extra["base"].path or "") / "index.json"
    before = index.read_bytes()
    index.write_bytes(before + b" ")
    try:
        with pytest.raises(UserError, match="these are others"), open_stored(trained / "run"):
            pass
    finally:
        index.write_bytes(before)
