"""A fine-tune of an imported model, against the loop that a user of transformers would write.

The loop has its own packing, masks and positions; only the order of sequences is asked for.
"""

import argparse
import json
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import train, verb
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from launcher.config.schema import DataChoice
from launcher.data import GlobalBatches, open_corpus
from launcher.data.splits import split_of

STEPS, SEQ_LEN, GLOBAL_BATCH = 12, 48, 8
LR, DECAY, CLIP = 2e-3, 0.1, 0.5
IGNORED = -100
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
)


def conversations() -> list[list[dict[str, str]]]:
    """Real text: the functions of a module, asked for by name; many are longer than a sequence."""
    assert argparse.__file__
    source = Path(argparse.__file__).read_text(encoding="utf-8")
    found = re.findall(r"    def (\w+)\(.*?\):\n(.*?)(?=\n    def |\nclass )", source, re.DOTALL)
    return [
        [
            {"role": "user", "content": f"What does {name} do?"},
            {"role": "assistant", "content": " ".join(body.split())[: 40 + 7 * (n % 30)]},
        ]
        for n, (name, body) in enumerate(found)
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama as transformers saves it, its chat tokenizer, and chats.jsonl."""
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("llama")
    chats = conversations()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((m["content"] for chat in chats for m in chat), trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")
    fast.chat_template = CHATML
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=400,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    lines = (json.dumps({"messages": chat}) + "\n" for chat in chats)
    (folder / "chats.jsonl").write_text("".join(lines), encoding="utf-8")
    return folder


@dataclass
class Packed:
    """A split as a row of tokens, each with its label and its position in its document."""

    ids: list[int]
    labels: list[int]
    positions: list[int]

    def inputs(self, begin: int) -> dict[str, Tensor]:
        """The sequence that begins at a token, for transformers, and its targets."""
        end = min(begin + SEQ_LEN, len(self.ids) - 1)
        positions = torch.tensor(self.positions[begin:end])
        position = torch.arange(end - begin)
        first = position - positions  # of the document, which may have begun before
        seen = (position[None, :] <= position[:, None]) & (position[None, :] >= first[:, None])
        mask = torch.zeros(seen.shape).masked_fill_(~seen, torch.finfo(torch.float32).min)
        return {
            "input_ids": torch.tensor(self.ids[begin:end])[None],
            "position_ids": positions[None],
            "attention_mask": mask[None, None],
            "targets": torch.tensor(self.labels[begin + 1 : end + 1])[None],
        }


def packed(folder: Path, split: str) -> Packed:
    """By transformers alone: its ids, its assistant mask, positions from 0 in each document."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    found = Packed([], [], [])
    for number, chat in enumerate(conversations()):
        if split_of(number) != split:
            continue
        one = tokenizer.apply_chat_template(
            chat, return_dict=True, return_assistant_tokens_mask=True
        )
        ids, learned = one["input_ids"], one["assistant_masks"]
        found.ids += ids
        # As transformers' DataCollatorWithFlattening: nothing predicts a document's first token.
        pairs = zip(ids[1:], learned[1:], strict=True)
        found.labels += [IGNORED, *(i if is_learned else IGNORED for i, is_learned in pairs)]
        found.positions += range(len(ids))
    return found


def losses_of(model: Any, rows: list[dict[str, Tensor]]) -> tuple[Tensor, int]:
    """The sum over the targets that count, and how many they are."""
    total, count = torch.zeros(()), 0
    for row in rows:
        targets = row["targets"]
        inputs = {name: value for name, value in row.items() if name != "targets"}
        logits = model(**inputs, use_cache=False).logits
        total = total + F.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum"
        )
        count += int((targets != IGNORED).sum())
    return total, count


def plain_loop(folder: Path, order: GlobalBatches) -> tuple[list[float], list[float], float]:
    """Losses and gradient norms of each step, and the loss over the test split."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(
        str(folder), dtype=torch.float32, attn_implementation="eager"
    )
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}],
        lr=LR,
        betas=(0.9, 0.95),
        eps=1e-8,
    )
    train = packed(folder, "train")
    losses, norms = [], []
    for step in range(STEPS):
        total, count = losses_of(model, [train.inputs(SEQ_LEN * n) for n in order.indices(step)])
        loss = total / count
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    test = packed(folder, "test")
    with torch.no_grad():
        rows = [test.inputs(begin) for begin in range(0, len(test.ids) - 1, SEQ_LEN)]
        total, count = losses_of(model, rows)
    return losses, norms, float(total) / count


def command(folder: Path, out: Path) -> list[str]:
    imported = folder / "imported"
    return [
        *(f"--config={imported / 'config.yaml'}", f"--resume={imported}"),
        *("--zero=3", "--device=cpu", f"--data={folder / 'chats.jsonl'}"),
        *(f"--tokenizer=hf:{folder}", "--document-attention", f"--seq-len={SEQ_LEN}"),
        *("--micro-batch=2", f"--global-batch={GLOBAL_BATCH}", f"--steps={STEPS}", f"--lr={LR}"),
        *("--schedule=constant", "--warmup-steps=0", f"--weight-decay={DECAY}", f"--clip={CLIP}"),
        *("--betas", "0.9", "0.95", "--eps=1e-8", "--test-batches=all", "--save-every=0"),
        f"--out={out}",
    ]


def checked(done: "subprocess.CompletedProcess[str]") -> None:
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_fine_tune_goes_on_as_a_plain_loop_of_transformers(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDSCALE_CACHE", str(tmp_path / "cache"))
    checked(verb("import", folder, "--out", folder / "imported"))
    checked(train(2, *command(folder, tmp_path / "run")))
    lines = (tmp_path / "run" / "rank0.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [record for record in map(json.loads, lines) if record["kind"] == "step"]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text(encoding="utf-8"))

    corpus = open_corpus(
        DataChoice(
            data=str(folder / "chats.jsonl"), tokenizer=f"hf:{folder}", document_attention=True
        ),
        vocab_size=400,
        seq_len=SEQ_LEN,
    )
    order = GlobalBatches(corpus.train, seq_len=SEQ_LEN, global_batch=GLOBAL_BATCH, seed=0)
    losses, norms, test_loss = plain_loop(folder, order)
    assert [step["loss"] for step in steps] == pytest.approx(losses, rel=1e-4)
    assert [step["grad_norm"] for step in steps] == pytest.approx(norms, rel=1e-3)
    assert summary["test_tokens"] == summary["test_split_tokens"]
    assert summary["test_loss"] == pytest.approx(test_loss, rel=1e-4)
    assert losses[-1] < 0.9 * losses[0]
    assert min(norms) > CLIP
