"""Recipes: listed, printed, and each trained on tiny weights."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from chat_tokenizers import CHATML, chat_tokenizer

from launcher.tools.recipe import recipe_cli as cli

ROOT = Path(__file__).parents[3]
TRAIN_EACH = """
import json, os, sys
from launcher import train
for name, argv in json.load(sys.stdin).items():
    child = os.fork()  # torch is imported once for all
    if not child:
        train.main(argv)
    print(name, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
TINY = "--steps 2 --micro-batch 2 --global-batch 2 --seq-len 48 --test-batches 1 --device cpu"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small chat model of transformers, examples, and a folder of texts."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("recipes")
    chat_tokenizer(folder / "base", CHATML)
    shape = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    shape |= {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 300}
    transformers.set_seed(0)
    config = transformers.LlamaConfig(**shape, max_position_embeddings=64)
    transformers.LlamaForCausalLM(config).save_pretrained(folder / "base")
    lines = ""
    for question in ("Which?", "What?"):
        turns = [
            {"role": "user", "content": question},
            {"role": "assistant", "content": "The largest."},
        ]
        lines += f"{json.dumps({'messages': turns})}\n"
    (folder / "examples.jsonl").write_text(lines * 30)
    (folder / "texts").mkdir()
    words = "What is the largest number that answers a question? " * 400
    (folder / "texts" / "a.txt").write_text(words)
    return folder


def test_each_recipe_trains(inputs: Path) -> None:
    runs = {}
    for name in cli.recipes():
        file = inputs / f"{name}.yaml"
        file.write_text(cli.text_of(name))
        argv = ["--config", str(file), *TINY.split(), "--out", str(inputs / "runs" / name)]
        data = "texts" if "data: texts" in cli.text_of(name) else "examples.jsonl"
        argv += ["--data", str(inputs / data), "--report-to", "none"]
        if "init_from:" in cli.text_of(name):
            argv += ["--init-from", str(inputs / "base")]
        runs[name] = argv
    runs["full-fine-tune"] += ["--precision", "fp32"]  # as what it is compared with
    done = subprocess.run(
        [sys.executable, "-c", TRAIN_EACH],
        input=json.dumps(runs),
        env={**os.environ, "SHARDSCALE_CACHE": str(inputs / "cache"), "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    codes = [line.split() for line in done.stdout.splitlines() if line.split(" ")[0] in runs]
    assert codes == [[name, "0"] for name in runs], done.stdout + done.stderr
    for name in runs:
        assert json.loads((inputs / "runs" / name / "summary.json").read_text())["test_loss"] > 0
    given = [name for name in runs if "init_from:" in cli.text_of(name)]
    assert done.stdout.count("held-out loss: ") == len(given) == 4
    assert done.stdout.count("  after:  ") == 2 * len([n for n in given if n in ANSWERING])
    for name in ANSWERING:
        before, _, after, _ = records_of(inputs / "runs" / name, "sample")
        assert (before["step"], after["step"]) == (0, 2)
        if name == "full-fine-tune":
            assert before["text"] == answer_of(inputs / "base", before["prompt"])
        losses = [each["loss"] for each in records_of(inputs / "runs" / name, "eval")][:2]
        assert losses[0] != losses[1]


ANSWERING = ("full-fine-tune", "lora", "qlora-24gb")


def records_of(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = (folder / "rank0.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


def answer_of(base: Path, prompt: str) -> str:
    """Return what transformers' greedy generation answers."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(base)
    tokens = torch.tensor([tokenizer.encode(prompt, add_special_tokens=False)])
    model = AutoModelForCausalLM.from_pretrained(base)
    most = min(64, 48 - tokens.shape[1])
    text = model.generate(tokens, do_sample=False, max_new_tokens=most, pad_token_id=0)
    return str(tokenizer.decode(text[0, tokens.shape[1] :], skip_special_tokens=True))


def test_the_list_fits_a_terminal_and_each_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert max(map(len, shown)) <= 80
    assert len(cli.recipes()) == 5
    for name in cli.recipes():
        assert any(line.startswith(f"  {name} ") for line in shown)
        assert cli.main([name]) == 0
        assert capsys.readouterr().out == cli.text_of(name)


def test_an_unknown_recipe_is_answered_with_the_nearest(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["lorra"]) == 2
    assert capsys.readouterr().err == (
        "shardscale: there is no recipe 'lorra': did you mean lora?\n"
    )
