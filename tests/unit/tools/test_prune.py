"""`shardscale prune` as a user meets it: the folder that it makes, and what it refuses."""

import dataclasses
import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from launcher.checkpoint import Checkpoint, Checkpointer
from launcher.checkpoint.pretrained.stored import open_stored
from launcher.config.arguments import parse_run_config
from launcher.config.resolve import resolve
from launcher.data import GlobalBatches
from launcher.forecast.predict import predict
from launcher.model.config import ModelConfig
from launcher.parallel.world import start
from launcher.run.prepare import prepare
from launcher.run.provenance import base_of
from launcher.run.saves import run_entries
from launcher.strategies.engine import LossScale, train_step
from launcher.strategies.flat_shards import MASK, PARAM
from launcher.strategies.masks import zero
from launcher.tools.exchange import export_cli
from launcher.tools.generate import generate_cli as generate
from launcher.tools.prune import prune_cli as cli
from launcher.tools.prune.choice import PruneOptions, check_prunable
from launcher.train import build_engine, to_device
from launcher.util.errors import UserError

SHAPE = ("--layers=2", "--d-model=48", "--heads=4", "--context=16", "--device=cpu")
BYTE = ("--tokenizer=byte", "--vocab-size=257")
LLAMA = (
    *("--kv-heads=2", "--position=rope", "--norm=rms", "--activation=swiglu", "--d-ff=96"),
    *("--bias=none", "--tied=False"),
)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\n\n".join(f"Paragraph {n} says {n * n} times little." for n in range(300)))
    return path


@pytest.fixture(autouse=True)
def cache(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDSCALE_CACHE", str(text.parent / "cache"))


def saved(folder: Path, text: Path, *flags: str) -> Path:
    """A run folder with step 3 of a model that nobody has trained."""
    patch = pytest.MonkeyPatch()
    patch.setenv("SHARDSCALE_CACHE", str(text.parent / "cache"))
    arguments = [*SHAPE, *BYTE, "--steps=9", f"--data={text}", *flags]
    prepared = prepare(arguments, world_size=1, ranks_per_node=1)
    engine = build_engine(prepared.resolved, start("cpu", timeout_s=60.0, needs_group=False))
    extra = run_entries(prepared.resolved, prepared.corpus)
    if (base := base_of(prepared.resolved)) is not None:
        extra["base"] = base
    Checkpointer(folder / "checkpoints").save(3, engine, extra)
    patch.undo()
    return folder


@pytest.fixture(scope="module")
def run(text: Path) -> Path:
    return saved(text.parent / "run", text)


@pytest.fixture(scope="module")
def llama(text: Path) -> Path:
    return saved(text.parent / "llama", text, *LLAMA)


def pruned(source: Path, out: Path, *flags: str) -> dict[str, Any]:
    """The report of one that must succeed."""
    assert cli.main([str(source), f"--out={out}", "--device=cpu", *flags]) == 0
    report: dict[str, Any] = json.loads((out / "pruning.json").read_text(encoding="utf-8"))
    return report


@pytest.mark.parametrize("method", ["magnitude", "wanda"])
@pytest.mark.parametrize("pattern", ["unstructured", "2:4"])
def test_masks_are_stored_beside_zeros(
    run: Path, tmp_path: Path, pattern: str, method: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "half"
    report = pruned(run, out, f"--pattern={pattern}", f"--method={method}")
    said = capsys.readouterr().out
    assert "50.00%" in said
    assert f"{report['perplexity']['after']:.3f} after" in said
    assert ("a CPU gains no speed" in said) == (pattern == "2:4")
    checkpoint = Checkpoint.open(out / "checkpoints" / "step-00000000")
    with open_stored(run) as before, open_stored(out) as after:
        assert after.config.masks
        assert report["fingerprint"] == before.base().fingerprint
        (file,) = checkpoint.files
        masks = [entry for entry in file.ranges if entry.kind == "mask"]
        assert len(masks) == 4 * 2
        for entry in masks:
            place: Any = {"offset": entry.offset_bytes, "count": entry.numel}
            packed = np.fromfile(checkpoint.path / file.name, "u1", **place)
            dense, sparse = before.read(entry.name), after.read(entry.name)
            assert len(packed) == -(-dense.numel() // 8)
            bits = np.unpackbits(packed, count=dense.numel(), bitorder="little")
            stays = torch.from_numpy(bits).bool().view_as(dense)
            assert torch.equal(sparse, dense * stays)
            assert int(stays.sum()) == dense.numel() // 2
            if pattern == "2:4":
                assert (stays.view(-1, 4).sum(dim=1) == 2).all()
            elif method == "wanda":
                assert (stays.sum(dim=1) == dense.size(1) // 2).all()
        for name in ("wte.weight", "ln_f.weight", "blocks.0.attn.qkv.bias"):
            assert torch.equal(before.read(name), after.read(name))


@pytest.mark.parametrize("source", ["the run's", "given", "none"])
def test_the_command_that_continues_names_the_text(
    run: Path, text: Path, tmp_path: Path, source: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without --data, training would read the default corpus, whatever the model was trained on."""
    lines = tmp_path / "more lines.jsonl"
    lines.write_text("".join(f'{{"text": "Number {n} of them."}}\n' for n in range(300)))
    given = {"the run's": (), "given": (f"--data={lines}",), "none": ("--data=none",)}
    pruned(run, tmp_path / "half", *given[source])
    command = capsys.readouterr().out.splitlines()[-1].partition("shardscale train ")[2]
    words = shlex.split(command)
    named = {"the run's": str(text), "given": str(lines), "none": "DATA"}
    assert words[2:4] == ["--data", named[source]]
    assert parse_run_config(words[:4]).data.data == named[source]


@pytest.mark.parametrize("pattern", ["heads", "mlp"])
def test_a_smaller_model_plans_trains_exports_and_writes(
    llama: Path, text: Path, tmp_path: Path, pattern: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "smaller"
    report = pruned(llama, out, f"--pattern={pattern}", "--method=wanda")
    whole, heads = 48 * 48, 2 * (48 * 24 + 2 * 24 * 24)
    removed = {"heads": heads, "mlp": 3 * 48 * 48}
    dense = 2 * 257 * 48 + 5 * 48 + 2 * (2 * whole + 2 * 24 * 48 + 3 * 96 * 48)
    expected = dense - 2 * {"heads": (24 + 2 * 12) * 48 + 24 * 48, "mlp": removed["mlp"]}[pattern]
    assert sum(kind["before"] for kind in report["kinds"]) == dense
    assert sum(kind["after"] for kind in report["kinds"]) == expected
    assert f"a dense model of {expected:,} parameters" in capsys.readouterr().out

    config = parse_run_config([f"--init-from={out}", "--device=cpu", "--strategy=single"])
    resolved = resolve(config, world_size=1, device_type="cpu")
    assert resolved.model.parameter_count == expected
    held = predict(resolved).held.device
    assert (held.params_bytes, held.masks_bytes) == (4 * expected, 0)
    begins = [f"--init-from={out}", f"--data={text}", "--device=cpu", "--steps=2"]
    prepared = prepare(begins, world_size=1, ranks_per_node=1)
    assert prepared.resolved.model.parameter_count == expected
    assert generate.main([str(out), "--prompt=Paragraph", "--max-tokens=3", "--device=cpu"]) == 0
    assert export_cli.main([str(out), f"--out={tmp_path / 'hf'}"]) == 0
    from transformers import LlamaForCausalLM

    theirs = LlamaForCausalLM.from_pretrained(str(tmp_path / "hf"))
    assert sum(p.numel() for p in theirs.parameters()) == expected


def test_gpt2_with_fewer_heads_is_none_of_transformers(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pruned(run, tmp_path / "heads", "--pattern=heads")
    capsys.readouterr()
    assert export_cli.main([str(tmp_path / "heads"), f"--out={tmp_path / 'hf'}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "head_dim 12: transformers has no such model" in line
    assert not (tmp_path / "hf").exists()
    bare = [str(tmp_path / "heads"), f"--out={tmp_path / 'ours'}", "--format=safetensors"]
    assert export_cli.main(bare) == 0


def test_a_masked_run_is_planned_with_its_masks(run: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "half"
    pruned(run, out)
    begins = [f"--init-from={out}", f"--data={text}", "--device=cpu", "--steps=2"]
    weights = 2 * (4 * 48 * 48 + 2 * 192 * 48)
    for flags, expected in (((), weights // 8), (("--no-masks",), 0)):
        resolved = prepare([*begins, *flags], world_size=1, ranks_per_node=1).resolved
        held = predict(resolved).held.device
        assert held.masks_bytes == expected
        engine = build_engine(resolved, start("cpu", timeout_s=60.0, needs_group=False))
        count = engine.count_states().ledger(torch.device("cpu")).device
        assert count.masks_bytes == expected
        assert hasattr(engine, "inner") == bool(expected)  # nothing of it in other runs


def test_a_flipped_mask_is_damage(run: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "half"
    pruned(run, out)
    checkpoint = Checkpoint.open(out / "checkpoints" / "step-00000000")
    (file,) = checkpoint.files
    entry = next(entry for entry in file.ranges if entry.kind == "mask")
    with (checkpoint.path / file.name).open("rb+") as opened:
        opened.seek(entry.offset_bytes + 5)
        byte = opened.read(1)[0]
        opened.seek(entry.offset_bytes + 5)
        opened.write(bytes([byte ^ 4]))
    begins = [f"--init-from={out}", f"--data={text}", "--device=cpu", "--steps=2"]
    resolved = prepare(begins, world_size=1, ranks_per_node=1).resolved
    engine = build_engine(resolved, start("cpu", timeout_s=60.0, needs_group=False))
    with open_stored(out) as weights, pytest.raises(UserError, match=r"damaged.*\(mask\)"):
        Checkpointer(tmp_path / "new").begin_with(weights, engine)


def masked_nonzero(engine: Any) -> tuple[int, int]:
    """Count what is not 0 of the weights whose bit is 0, and of the others."""
    state = engine.training_state()
    shards = {(shard.name, shard.kind): shard.data for shard in state.loaded()}
    pruned_count = other_count = 0
    for (name, kind), bits in shards.items():
        if kind == MASK:
            weights = shards[name, PARAM]
            ones = torch.ones(weights.numel())
            zero(ones, bits, skip=0)
            stays = ones.bool()
            pruned_count += int(weights[~stays].count_nonzero())
            other_count += int(weights[stays].count_nonzero())
    return pruned_count, other_count


@pytest.mark.parametrize("precision", ["bf16", "fp16", "bf16-pure", "fp8"])
def test_zeros_stay_in_every_precision(
    precision: str, run: Path, text: Path, tmp_path: Path
) -> None:
    pruned(run, tmp_path / "half")
    begins = [f"--init-from={tmp_path / 'half'}", f"--data={text}", "--device=cpu", "--steps=3"]
    found = prepare(begins, world_size=1, ranks_per_node=1)
    # A CPU is refused fp8, since it can only emulate it; here that is enough.
    config = found.resolved.config.replace(precision=precision)
    resolved = dataclasses.replace(found.resolved, config=config)
    engine = build_engine(resolved, start("cpu", timeout_s=60.0, needs_group=False))
    engine.set_loss_scale(LossScale(scale=1024.0, good_steps=0))
    with open_stored(tmp_path / "half") as weights:
        Checkpointer(tmp_path / "new").begin_with(weights, engine)
    batches = GlobalBatches(found.corpus.train, seq_len=16, global_batch=8, seed=0)
    _, before = masked_nonzero(engine)
    for step in range(3):
        rows = batches.rank_slice(step, rank=0, world_size=1)
        _, (_, applied) = train_step(engine, to_device(rows, 8, torch.device("cpu")), 1e-2)
        assert bool(applied)
    pruned_count, other_count = masked_nonzero(engine)
    assert pruned_count == 0
    assert other_count > 0.99 * before > 0


def test_a_masked_run_is_gone_on_with_as_one(run: Path, text: Path, tmp_path: Path) -> None:
    pruned(run, tmp_path / "half")
    common = [f"--data={text}", "--device=cpu", "--steps=9"]
    begins = [f"--init-from={tmp_path / 'half'}", *common]
    prepared = prepare(begins, world_size=1, ranks_per_node=1)
    engine = build_engine(prepared.resolved, start("cpu", timeout_s=60.0, needs_group=False))
    folder = tmp_path / "on" / "checkpoints"
    Checkpointer(folder).save(3, engine, run_entries(prepared.resolved, prepared.corpus))
    resumes = [*SHAPE, *BYTE, *common, f"--resume={tmp_path / 'on'}"]
    with pytest.raises(UserError, match=r"holds a model of --masks.*give the same"):
        prepare(resumes, world_size=1, ranks_per_node=1)
    found = prepare([*resumes, "--masks"], world_size=1, ranks_per_node=1)
    assert found.resume.source == tmp_path / "on"


@pytest.mark.parametrize("sparsity", [0.0833333, 0.166667, 0.916667])
def test_a_multiple_may_be_rounded(sparsity: float) -> None:
    options = PruneOptions(run=Path(), out=Path(), pattern="heads", sparsity=sparsity)
    check_prunable(ModelConfig(layers=1, d_model=48, heads=12, vocab_size=8, context=8), options)
    assert options.removed_of(12) == round(12 * sparsity)


REFUSED = {
    "sparsity": (["--sparsity=1.5"], "--sparsity 1.5 must be above 0 and below 1"),
    "nan": (["--sparsity=nan"], "--sparsity nan must be above 0 and below 1"),
    "not half": (["--pattern=2:4", "--sparsity=0.6"], "--sparsity 0.6 with --pattern 2:4"),
    "not whole": (["--pattern=heads", "--sparsity=0.3"], "of 4 heads is 1.2"),
    "no head": (["--pattern=heads", "--sparsity=0.9999999"], "of 4 heads is 4, but whole heads"),
    "no unit": (["--pattern=mlp", "--sparsity=0.001"], "removes 0 of the 192 hidden units"),
    "none": (["--method=wanda", "--sparsity=0.001"], "removes 0 of the 48 competing"),
    "all": (["--method=wanda", "--sparsity=0.999"], "removes 48 of the 48 competing"),
    "no text": (["--method=wanda", "--data=none"], "a calibration text, and --data is none: give"),
    "text gone": (["--data=gone.txt"], "gone.txt"),
    "tokens": (["--calibration-tokens=0"], "--calibration-tokens 0 must be 1 or more"),
    "pattern": (["--pattern=4:8"], "invalid choice"),
}


def refused(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    """The one sentence; nothing is left behind."""
    capsys.readouterr()
    out = next(Path(str(a).partition("=")[2]) for a in arguments if str(a).startswith("--out="))
    before = sorted(out.parent.iterdir())
    assert cli.main([*map(str, arguments), "--device=cpu"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert sorted(out.parent.iterdir()) == before
    return line


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_asked_for(
    name: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags, sentence = REFUSED[name]
    assert sentence in refused(capsys, run, f"--out={tmp_path / 'out'}", *flags)


def test_what_cannot_be_pruned(
    run: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = f"--out={tmp_path / 'out'}"
    said = refused(capsys, tmp_path / "gone", out)
    assert f"{tmp_path / 'gone'}: does not exist: give a folder that holds a model, or hf:" in said
    assert "holds no checkpoint" in refused(capsys, tmp_path, out)
    assert "already exists" in refused(capsys, run, f"--out={text.parent / 'run'}")
    adapters = saved(tmp_path / "lora", text, "--lora-rank=2", "--random-base")
    assert "merge them first" in refused(capsys, adapters, out)
    packed = saved(
        tmp_path / "nf4",
        text,
        *LLAMA,
        "--d-model=64",
        "--d-ff=128",
        "--lora-rank=2",
        "--random-base",
        "--quantize-base=nf4",
    )
    assert "merge them first" in refused(capsys, packed, out)
    alone = saved(tmp_path / "alone", text, *LLAMA, "--kv-heads=1")
    assert "use --pattern mlp" in refused(capsys, alone, out, "--pattern=heads")
    odd = saved(tmp_path / "odd", text, "--d-model=30", "--heads=2")
    assert "rows of 30: use --pattern unstructured" in refused(capsys, odd, out, "--pattern=2:4")
    pruned(run, tmp_path / "half")
    assert "is already pruned" in refused(capsys, tmp_path / "half", out)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--lora-rank=2"], "--masks with --lora-rank 2"),
        (["--tensor-parallel=2"], "--masks with --tensor-parallel 2"),
        (["--zero=3", "--offload-optimizer=nvme", "--nvme-path=."], "--masks with --offload-opt"),
    ],
)
def test_what_masks_do_not_go_with(
    run: Path, tmp_path: Path, flags: list[str], sentence: str
) -> None:
    pruned(run, tmp_path / "half")
    config = parse_run_config([f"--init-from={tmp_path / 'half'}", *flags])
    with pytest.raises(UserError, match=sentence):
        resolve(config, world_size=2, device_type="cpu")


def test_masks_that_nobody_has(run: Path, text: Path, tmp_path: Path) -> None:
    common = [f"--data={text}", "--device=cpu", "--steps=9", "--masks"]
    with pytest.raises(UserError, match="give --init-from a run that it has made"):
        prepare([*SHAPE, *BYTE, *common], world_size=1, ranks_per_node=1)
    pruned(run, tmp_path / "heads", "--pattern=heads")
    with pytest.raises(UserError, match="has no masks that --masks could hold"):
        prepare([f"--init-from={tmp_path / 'heads'}", *common], world_size=1, ranks_per_node=1)
    with pytest.raises(UserError, match=r"holds a model of --no-masks.*give the same"):
        prepare([*SHAPE, *BYTE, f"--resume={run}", *common], world_size=1, ranks_per_node=1)
