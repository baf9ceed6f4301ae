"""What a checkpoint says of itself, and what a run that goes on from it may do otherwise."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest

from launcher.checkpoint import Checkpoint, Checkpointer
from launcher.checkpoint.document import digest
from launcher.config.model import CHANGES_ADAPTERS
from launcher.config.schema import field_types
from launcher.data.tokenizer import tokenizer_fingerprint, train_bpe
from launcher.model.config import ModelConfig
from launcher.parallel.world import start
from launcher.run.prepare import Prepared, prepare
from launcher.run.provenance import (
    REPORTED_OF_MODEL,
    REPORTED_OF_RUN,
    _change,
    differences,
)
from launcher.run.same_model import CHANGES_THE_FUNCTION
from launcher.run.saves import run_entries
from launcher.train import build_engine
from launcher.util.errors import UserError

# Where, how long, how fast and on what: no number that training computes changes.
SAYS_NOTHING = (
    *("model", "decoder", "init_from", "activation_checkpointing", "loss_chunk", "mlp_tile"),
    "tokenizer",
    *("micro_batch", "strategy", "zero", "reshard_after_forward"),
    *("replicate", "reduce_each_micro_batch", "offload_optimizer", "offload_param"),
    "offload_fraction",
    *("deepspeed", "pin_memory", "nvme_path"),
    *("optimizer_in_backward", "epochs", "max_minutes"),
    *("eval_every", "save_every", "save_minutes", "keep"),
    *("stop_after", "resume", "out", "device"),
    *("compile", "cuda_graphs", "collective_timeout_s", "log_every"),
    "memory_trace",
    *("memory_limit", "report_to", "test_batches", "log_level"),
    *("sample_every", "context_parallel", "context_parallel_method"),
    *("tensor_parallel", "random_base"),
)
FLAGS = ["--device=cpu", "--layers=1", "--d-model=48", "--heads=2", "--context=16", "--steps=9"]
BYTE = ["--tokenizer=byte", "--vocab-size=257"]


def test_every_field_of_a_run_is_decided_about() -> None:
    decided = [
        *CHANGES_THE_FUNCTION,
        *CHANGES_ADAPTERS,
        *REPORTED_OF_MODEL,
        *REPORTED_OF_RUN,
        *SAYS_NOTHING,
        "masks",  # refused
    ]
    assert len(set(decided)) == len(decided)
    assert set(decided) - {"sdpa_backend"} == set(field_types())  # which --attention says
    of_the_model = {field.name for field in dataclasses.fields(ModelConfig)}
    assert {*CHANGES_THE_FUNCTION, *REPORTED_OF_MODEL} == of_the_model - {
        *("activation_checkpointing", "loss_chunk", "mlp_tile", "lora", "masks")
    }


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\n\n".join(f"Paragraph {n} says {n * n} times little." for n in range(300)))
    return path


@pytest.fixture(autouse=True)
def cache(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDSCALE_CACHE", str(text.parent / "cache"))


def prepared(text: Path, *flags: str) -> Prepared:
    return prepare([*FLAGS, f"--data={text}", *flags], world_size=1, ranks_per_node=1)


@pytest.fixture(scope="module")
def run(text: Path) -> Path:
    """The folder of a run that has saved step 3."""
    patch = pytest.MonkeyPatch()
    patch.setenv("SHARDSCALE_CACHE", str(text.parent / "cache"))
    saved = prepared(text, *BYTE)
    patch.undo()
    engine = build_engine(saved.resolved, start("cpu", timeout_s=60.0, needs_group=False))
    folder = text.parent / "run"
    extra = run_entries(saved.resolved, saved.corpus)
    Checkpointer(folder / "checkpoints").save(3, engine, extra)
    return folder


OTHERS = {
    "heads": (["--heads=3"], "--heads 2", "--heads 3"),
    "activation": (["--activation=relu"], "--activation gelu", "--activation relu"),
    "tied": (["--no-tied"], "--tied", "--no-tied"),
    "d_ff": (["--d-ff=64"], "--d-ff 192", "--d-ff 64"),
    "layers": (["--layers=2"], "--layers 1", "--layers 2"),
    "d_model": (["--d-model=32"], "--d-model 48 --d-ff 192", "--d-model 32 --d-ff 128"),
    "vocab_size": (["--vocab-size=300"], "--vocab-size 257", "--vocab-size 300"),
    "context": (["--context=8"], "--context 16", "--context 8"),
    "kv_heads": (["--kv-heads=1"], "--kv-heads 2", "--kv-heads 1"),
    "head_dim": (["--head-dim=12"], "--head-dim 24", "--head-dim 12"),
    "position": (
        ["--position=rope"],
        "--position learned",
        "--position rope --rope-theta 10000.0",
    ),
    "rope_theta": (
        ["--position=rope", "--rope-theta=500"],
        "--position learned",
        "--position rope --rope-theta 500.0",
    ),
    "rope_scaling": (
        ["--position=rope", "--rope-scaling", "8", "1", "4", "16"],
        "--position learned",
        "--position rope --rope-theta 10000.0 --rope-scaling 8.0 1.0 4.0 16.0",
    ),
    "norm": (["--norm=rms"], "--norm layer", "--norm rms"),
    "norm_eps": (["--norm-eps=1e-6"], "--norm-eps 1e-05", "--norm-eps 1e-06"),
    "qk_norm": (["--qk-norm"], "--no-qk-norm", "--qk-norm"),
    "bias": (["--bias=mlp,qkv"], "--bias all", "--bias qkv,mlp"),
}


def old(run: Path, folder: Path) -> Path:
    """The same run as a version before 0.2 would have saved it."""
    path = folder / "old" / "checkpoints" / "step-00000003"
    path.mkdir(parents=True)
    source = run / "checkpoints" / "step-00000003"
    for file in source.iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    document = json.loads((path / "index.json").read_text())
    for name in ("model", "tokenizer", "corpus"):
        del document["content"]["extra"][name]
    document["sha256"] = digest(document["content"])
    (path / "index.json").write_text(json.dumps(document))
    return folder / "old"


@pytest.mark.parametrize("field", CHANGES_THE_FUNCTION)
@pytest.mark.parametrize("version", ["0.1", "0.2"])
def test_another_function_is_refused_by_name_and_value(
    run: Path, text: Path, tmp_path: Path, field: str, version: str
) -> None:
    source = run if version == "0.2" else old(run, tmp_path)
    flags, there, here = OTHERS[field]
    with pytest.raises(UserError) as caught:
        prepared(text, *BYTE, *flags, f"--resume={source}", f"--out={tmp_path / 'out'}")
    said = str(caught.value)
    assert f"holds a model of {there}, and this run's is of {here}: give" in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("flags", "refusal"),
    [
        (["--warmup-steps=2"], "--warmup-steps 2 is more than the 1 steps of the schedule"),
        (["--schedule=wsd", "--decay-steps=2"], "--decay-steps 2 is more than the schedule's 1"),
        ([], "step 3 is already reached there, and the schedule's last one is 1"),
    ],
)
def test_steps_of_epochs_are_held_to_the_same_rules(
    flags: list[str], refusal: str, run: Path, text: Path
) -> None:
    by_epochs = [flag for flag in (*FLAGS, *BYTE) if not flag.startswith("--steps")]
    argv = [*by_epochs, f"--data={text}", "--epochs=0.001", f"--resume={run}", *flags]
    with pytest.raises(UserError, match=refusal):
        prepare(argv, world_size=1, ranks_per_node=1)


def test_adapters_that_a_checkpoint_lacks_are_refused_by_name(run: Path, text: Path) -> None:
    with pytest.raises(UserError, match="holds a model of no --lora-rank, and this run's is of"):
        prepared(text, *BYTE, "--lora-rank=2", f"--resume={run}")


LLAMA = [
    *("--layers=2", "--d-model=64", "--heads=4", "--kv-heads=2", "--d-ff=128", "--context=32"),
    *("--position=rope", "--norm=rms", "--norm-eps=1e-6", "--activation=swiglu", "--bias=none"),
    "--no-tied",
]


def test_many_differences_are_refused_with_a_whole_remedy(
    run: Path, text: Path, tmp_path: Path
) -> None:
    """All flags of both models are longer than a sentence, which is cut in its middle."""
    resume = f"--resume={run}"
    with pytest.raises(UserError) as caught:
        prepared(text, *BYTE, *LLAMA, resume)
    said = str(caught.value)
    assert "by --layers, --heads and 9 other flags: give --layers 1 --heads 2" in said
    assert said.endswith("6 more of extra.config in its index.json")
    (run / "config.yaml").write_text("steps: 9\n")
    try:
        with pytest.raises(UserError) as caught:
            prepared(text, *BYTE, *LLAMA, resume)
    finally:
        (run / "config.yaml").unlink()
    said = str(caught.value)
    assert said.endswith(f"give --config {run / 'config.yaml'} of the run that saved it")
    assert "..." not in said


def test_another_tokenizer_is_refused(run: Path, text: Path, tmp_path: Path) -> None:
    # As large as the one of bytes, so that every shape is the same.
    train_bpe(["no merges fit into 257"], 257).save(tmp_path / "other.json")
    other = json.loads((tmp_path / "other.json").read_text())
    vocabulary = other["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (tmp_path / "other.json").write_text(json.dumps(other))
    flags = [f"--tokenizer={tmp_path / 'other.json'}", "--vocab-size=257", f"--resume={run}"]
    with pytest.raises(UserError, match="was trained with --tokenizer byte, and this run has"):
        prepared(text, *flags)


def test_bpe_of_other_data_is_another_tokenizer_and_the_saved_one_is_not(
    text: Path, tmp_path: Path
) -> None:
    saved = prepared(text, "--vocab-size=300")
    engine = build_engine(saved.resolved, start("cpu", timeout_s=60.0, needs_group=False))
    for name, extra in (("run", run_entries(saved.resolved, saved.corpus)), ("bare", {})):
        Checkpointer(tmp_path / name / "checkpoints").save(3, engine, extra)
        own = tmp_path / name / "tokenizer.json"
        assert saved.corpus.tokenizer_path is not None
        own.write_bytes(saved.corpus.tokenizer_path.read_bytes())
    other = tmp_path / "other.txt"
    other.write_text("\n\n".join(f"Something else entirely, number {n}." for n in range(400)))
    for name in ("run", "bare"):  # what is not in the checkpoint is in its run's folder
        resume = f"--resume={tmp_path / name}"
        with pytest.raises(UserError) as caught:
            prepared(other, "--vocab-size=300", resume)
        assert "trained on this run's data" in str(caught.value)
        fix = tmp_path / name / "tokenizer.json"
        assert str(caught.value).endswith(f"give --tokenizer {fix}")
        prepared(other, "--vocab-size=300", resume, f"--tokenizer={fix}")


def test_the_runs_own_copy_replaces_a_tokenizer_that_is_gone(text: Path, tmp_path: Path) -> None:
    """An imported model, whose config.yaml names its copy, may be removed once it is trained."""
    train_bpe(["some text, some more text"], 280).save(tmp_path / "given.json")
    flags = ["--vocab-size=280", f"--tokenizer={tmp_path / 'given.json'}"]
    saved = prepared(text, *flags)
    engine = build_engine(saved.resolved, start("cpu", timeout_s=60.0, needs_group=False))
    extra = run_entries(saved.resolved, saved.corpus)
    Checkpointer(tmp_path / "run" / "checkpoints").save(3, engine, extra)
    resume = f"--resume={tmp_path / 'run'}"
    own = (tmp_path / "given.json").rename(tmp_path / "run" / "tokenizer.json")
    assert prepared(text, *flags, resume).resolved.config.data.tokenizer == str(own)
    own.unlink()
    with pytest.raises(UserError, match="there is no tokenizer"):
        prepared(text, *flags, resume)


@pytest.mark.parametrize("auto", [True, False])
def test_what_a_run_began_with_may_be_gone_once_it_has_saved(
    auto: bool, run: Path, text: Path, tmp_path: Path
) -> None:
    flags = [*BYTE, f"--init-from={tmp_path / 'gone'}"]
    flags += ["--resume=auto", f"--out={tmp_path / 'own'}"] if auto else [f"--resume={run}"]
    if auto:
        with pytest.raises(UserError, match=r"--init-from .*gone: is no folder"):
            prepared(text, *flags)
        shutil.copytree(run, tmp_path / "own")
        (tmp_path / "own" / "config.yaml").touch()
    assert prepared(text, *flags).resume.source is not None
    with pytest.raises(UserError, match=r"--init-from .*gone: is no folder"):
        prepared(text, *flags, "--lora-rank=2")  # adapters need them


def test_how_a_tokenizer_is_spelled_does_not_matter(tmp_path: Path) -> None:
    train_bpe(["some text, some more text, and then some"], 280).save(tmp_path / "a.json")
    document = json.loads((tmp_path / "a.json").read_text())
    first = tokenizer_fingerprint(tmp_path / "a.json")
    merges = document["model"]["merges"]
    document["model"]["merges"] = [" ".join(m) if isinstance(m, list) else m for m in merges]
    document["truncation"] = {
        "direction": "Right",
        "max_length": 8,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    (tmp_path / "b.json").write_text(json.dumps(document))
    assert tokenizer_fingerprint(tmp_path / "b.json") == first
    document["pre_tokenizer"]["add_prefix_space"] = True
    (tmp_path / "c.json").write_text(json.dumps(document))
    assert tokenizer_fingerprint(tmp_path / "c.json") != first
    document["pre_tokenizer"]["add_prefix_space"] = False
    vocabulary = document["model"]["vocab"]
    zero = next(token for token, number in vocabulary.items() if number == 0)
    one = next(token for token, number in vocabulary.items() if number == 1)
    vocabulary[zero], vocabulary[one] = 1, 0
    (tmp_path / "d.json").write_text(json.dumps(document))
    assert tokenizer_fingerprint(tmp_path / "d.json") != first


CHANGES: dict[str, tuple[list[str], list[str]]] = {
    "nothing": ([], []),
    "nothing that counts": (["--log-every=1", "--keep=2"], []),
    "dropout": (["--dropout=0.1"], ["dropout 0.0 -> 0.1"]),
    "window": (["--window=4"], ["window not given -> 4"]),
    "kernel": (["--attention=eager"], ["attention sdpa -> eager"]),
    "backend": (["--attention=sdpa-math"], ["sdpa_backend auto -> math"]),
    "context": (
        ["--context=32", "--seq-len=16"],
        ["context 16 -> 32 (positions from 16 on are new)"],
    ),
    "length": (["--seq-len=8"], ["seq_len 16 -> 8"]),
    "schedule": (["--steps=20"], ["steps 9 -> 20"]),
    "precision": (["--precision=bf16"], ["precision fp32 -> bf16"]),
    "betas": (["--betas", "0.8", "0.9"], ["betas [0.9, 0.95] -> [0.8, 0.9]"]),
    "optimizer": (["--optimizer=adam", "--lr=1"], ["optimizer adamw -> adam", "lr 0.001 -> 1.0"]),
    "seed": (["--seed=3"], ["seed 0 -> 3"]),
}


@pytest.mark.parametrize("case", CHANGES)
@pytest.mark.parametrize("version", ["0.1", "0.2"])
def test_legitimate_differences_are_said(
    run: Path, text: Path, tmp_path: Path, case: str, version: str
) -> None:
    source = run if version == "0.2" else old(run, tmp_path)
    flags, expected = CHANGES[case]
    if (case, version) == ("kernel", "0.1"):
        expected = []  # it only says "auto"
    now = prepared(text, *BYTE, *flags, f"--resume={source}")
    assert said(source, now) == expected


def said(source: Path, now: Prepared) -> list[str]:
    checkpoint = Checkpoint.open(source / "checkpoints" / "step-00000003")
    return differences(checkpoint, now.resolved, now.corpus)


def test_other_data_and_changed_data_are_said(run: Path, text: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text(text.read_text() + "\n\nAnd one more.")
    now = prepared(other, *BYTE, f"--resume={run}")
    assert said(run, now) == [f"data {text} -> {other}"]
    before = text.read_text()
    try:
        text.write_text(other.read_text())
        now = prepared(text, *BYTE, f"--resume={run}")
        assert said(run, now) == [f"the text of --data {text}"]
    finally:
        text.write_text(before)


def test_a_damaged_tokenizer_of_an_old_run_is_unknown(
    run: Path, text: Path, tmp_path: Path
) -> None:
    source = old(run, tmp_path)
    (source / "tokenizer.json").write_text("{")
    other = tmp_path / "bpe.json"
    train_bpe(["nothing"], 257).save(other)
    now = prepared(text, "--vocab-size=257", f"--tokenizer={other}", f"--resume={source}")
    assert said(source, now) == [f"tokenizer byte -> {other}"]


def test_what_is_shown_of_a_checkpoint_cannot_hurt_a_terminal() -> None:
    assert _change("data", "a\x1b[2J\nb", None) == r"data 'a\x1b[2J\nb' -> not given"
