"""--init-from: training begins with the weights of transformers, or of another run."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import train, write_text

from launcher.config.schema import DataChoice
from launcher.data import GlobalBatches, open_corpus
from launcher.data.tokenizer import ByteEncoder
from launcher.run.prepare import prepare
from launcher.util.errors import UserError

STEPS, BATCH, SEQ_LEN = 3, 8, 32


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "text.txt")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama as transformers saves it, in bf16 and two shards, with a tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(3)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=260,
            hidden_size=48,
            intermediate_size=80,
            num_hidden_layers=2,
            num_attention_heads=6,
            num_key_value_heads=2,
            max_position_embeddings=64,
            tie_word_embeddings=False,
            initializer_range=0.1,
        )
    )
    model.to(torch.bfloat16).save_pretrained(folder, max_shard_size="100KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    ByteEncoder().save(folder / "tokenizer.json")
    return folder


def flags_of(text: Path, out: Path, *more: str) -> list[str]:
    flags = [f"--data={text}", f"--seq-len={SEQ_LEN}", f"--steps={STEPS}", "--device=cpu"]
    return [*flags, f"--global-batch={BATCH}", "--report-to=none", f"--out={out}", *more]


def losses(done: Any, out: Path) -> list[float]:
    assert done.returncode == 0, done.stderr
    lines = (out / "rank0.jsonl").read_text(encoding="utf-8").splitlines()
    return [record["loss"] for record in map(json.loads, lines) if record["kind"] == "step"]


@pytest.fixture(scope="module")
def single(text: Path, llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "single"
    flags = flags_of(text, out, f"--init-from={llama}", "--micro-batch=8")
    done = train(1, *flags)
    assert f"begins with the weights of {llama}" in done.stdout
    assert len(losses(done, out)) == STEPS
    return out


def recorded(run: Path) -> list[float]:
    lines = (run / "rank0.jsonl").read_text(encoding="utf-8").splitlines()
    return [record["loss"] for record in map(json.loads, lines) if record["kind"] == "step"]


def test_the_first_loss_is_that_of_transformers(text: Path, llama: Path, single: Path) -> None:
    from transformers import LlamaForCausalLM

    corpus = open_corpus(
        DataChoice(data=str(text), tokenizer=str(llama / "tokenizer.json")),
        vocab_size=260,
        seq_len=SEQ_LEN,
    )
    batches = GlobalBatches(corpus.train, seq_len=SEQ_LEN, global_batch=BATCH, seed=0)
    rows = torch.from_numpy(batches.rank_slice(0, rank=0, world_size=1).tokens)
    model = LlamaForCausalLM.from_pretrained(llama, dtype=torch.float32)
    logits = model(rows[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
    assert recorded(single)[0] == pytest.approx(loss.item(), rel=1e-5)


@pytest.mark.parametrize(
    "strategy",
    [("--zero=3",), ("--strategy=fsdp",), ("--strategy=ddp", "--optimizer=adamw8bit")],
    ids=" ".join,
)
def test_every_rank_begins_with_its_part(
    strategy: tuple[str, ...], text: Path, llama: Path, single: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    flags = flags_of(text, out, f"--init-from={llama}", "--micro-batch=4", *strategy)
    found = losses(train(2, *flags), out)
    tolerance = 1e-3 if "--optimizer=adamw8bit" in strategy else 2e-5
    assert found == pytest.approx(recorded(single), rel=tolerance)


def test_a_run_begins_with_another_runs_weights_and_a_new_optimizer(
    text: Path, single: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    flags = flags_of(text, out, f"--init-from={single}", "--micro-batch=4", "--zero=2")
    found = losses(train(2, *flags), out)
    # Its first batch is the one that the other run began with, and has learnt from.
    assert len(found) == STEPS
    assert found[0] < recorded(single)[0]
    index = json.loads((out / "checkpoints" / "step-00000003" / "index.json").read_text())
    assert index["content"]["counters"]["step"] == STEPS


def refusal(argv: list[str]) -> str:
    with pytest.raises(UserError) as caught:
        prepare(argv, world_size=1, ranks_per_node=1)
    return str(caught.value)


def test_a_run_continues_in_another_folder_by_its_own_config(
    text: Path, llama: Path, single: Path, tmp_path: Path
) -> None:
    """Its config.yaml names --init-from, which the resumed checkpoint's weights replace."""
    first, second = tmp_path / "first", tmp_path / "second"
    flags = flags_of(text, first, f"--init-from={llama}", "--micro-batch=8", "--stop-after=2")
    losses(train(1, *flags), first)
    own = [f"--config={first / 'config.yaml'}", f"--resume={first}"]
    more = ["--stop-after=3", f"--out={second}"]
    done = train(1, *own, *more)
    assert losses(done, second) == recorded(single)[2:]
    assert "resumed from" in done.stdout
    same = f"--init-from={llama / '..' / llama.name}"
    prepare(
        [*own, same, "--stop-after=3", f"--out={tmp_path / 'b'}"], world_size=1, ranks_per_node=1
    )
    others = [*own, f"--init-from={single}", more[0], f"--out={tmp_path / 'c'}"]
    assert "both say where weights come from" in refusal(others)


def test_what_cannot_be_begun_with_is_refused(text: Path, llama: Path, tmp_path: Path) -> None:
    out, empty = tmp_path / "out", tmp_path / "empty"
    empty.mkdir()
    bare = tmp_path / "bare"
    bare.mkdir()
    for file in llama.glob("*[!r].json"):
        (bare / file.name).symlink_to(file)
    for file in llama.glob("*.safetensors"):
        (bare / file.name).symlink_to(file)
    (bare / "tokenizer.json").unlink(missing_ok=True)
    gone = tmp_path / "step-00000001"
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    (damaged / "config.yaml").write_text("layers: many\n")
    for flags, sentence in (
        ((f"--init-from={damaged}",), "layers is 'many', but must be a whole number"),
        ((f"--init-from={empty}",), "holds no config.json and no config.yaml"),
        ((f"--init-from={tmp_path / 'none'}",), "is no folder"),
        ((f"--init-from={llama}", "--heads=3"), "--heads 3 differs from --init-from"),
        ((f"--init-from={llama}", "--norm=layer"), "which has --norm rms: leave it out"),
        ((f"--init-from={llama}", f"--resume={gone}"), "both say where weights come from"),
        ((f"--init-from={bare}",), "has no tokenizer.json: give --tokenizer FILE"),
        ((f"--init-from={llama}", "--seq-len=65"), "longer than the model's context of 64"),
    ):
        assert sentence in refusal(flags_of(text, out, *flags))
        assert not out.exists()
    done = train(1, *flags_of(text, out, f"--init-from={empty}"))
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "holds no config.json and no config.yaml" in line
