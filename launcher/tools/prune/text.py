"""The text that a model was trained on: input norms of its projections, and perplexity."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from launcher.config.rules import default_seq_len
from launcher.config.schema import DataChoice
from launcher.config.sharding import ShardingChoice
from launcher.data import Corpus, GlobalBatches, open_corpus, saved_data_choice
from launcher.model.config import ModelConfig
from launcher.model.gpt import GPT
from launcher.model.parts import is_projection
from launcher.parallel.mesh import Mesh
from launcher.parallel.world import World
from launcher.run.evaluation import VALIDATION_SEQUENCES, evaluate

BATCH = 8
"""Sequences per forward."""
TEXT_FIELDS = ("data", "data_field", "mask_prompt", "document_attention")
"""Fields of RunConfig that select the text."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Text:
    """A corpus, split into sequences as in training."""

    choice: DataChoice
    corpus: Corpus
    seq_len: int

    @classmethod
    def open(cls, choice: DataChoice, tokenizer: str, model: ModelConfig) -> "Text":
        """Open the text of `choice`, tokenized for a model.

        Raises:
            UserError: the text is missing, too short, or does not fit the tokenizer.
        """
        seq_len = min(choice.seq_len or default_seq_len(model), model.context)
        corpus = open_corpus(
            dataclasses.replace(choice, tokenizer=tokenizer),
            vocab_size=model.vocab_size,
            seq_len=seq_len,
        )
        return cls(choice=choice, corpus=corpus, seq_len=seq_len)

    def perplexity(self, model: GPT) -> float:
        """Compute perplexity of the validation split, on the sequences of `--eval-every`."""
        device = next(model.parameters()).device
        world = World(rank=0, local_rank=0, size=1, local_size=1, device=device)
        return evaluate(
            torch.no_grad()(model.forward),
            self.corpus.validation,
            world,
            mesh=Mesh.at(world.rank, world.size, ShardingChoice()),
            name="validation",
            step=0,
            seq_len=self.seq_len,
            batch=BATCH,
            max_sequences=VALIDATION_SEQUENCES,
        ).perplexity

    def input_norms(self, model: GPT, tokens: int) -> dict[str, Tensor]:
        """Return projection weight name -> L2 norms of its input features, fp32 [in].

        Measured over `tokens` tokens of the training split, or all of it where it is shorter. All
        norms are of the unpruned model; the authors of Wanda measure each block after pruning those
        before it.
        """
        square_sums: dict[str, Tensor] = {}

        def adding(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
            def add(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
                sums = inputs[0].flatten(0, -2).float().square().sum(dim=0)
                square_sums[name] = sums + square_sums.get(name, 0.0)

            return add

        hooks = [
            module.register_forward_pre_hook(adding(f"{name}.weight"))
            for name, module in model.named_modules()
            if is_projection(f"{name}.weight")
        ]
        device = next(model.parameters()).device
        batches = self._batches()
        with torch.no_grad():
            for step in range(self.calibration_steps(tokens)):
                rows = batches.rank_slice(step, rank=0, world_size=1)
                # the last column of tokens is a target only
                inputs = [rows.tokens[:, :-1], rows.all_targets()]
                inputs += [] if rows.starts is None else [rows.starts]
                model(*(torch.from_numpy(array).to(device) for array in inputs))
        for hook in hooks:
            hook.remove()
        return {name: sums.sqrt() for name, sums in square_sums.items()}

    def calibration_steps(self, tokens: int) -> int:
        """Return the batches for `tokens` tokens, at most those of one pass over the split."""
        # A second pass would scale all norms, and hardly change which weights go.
        return min(math.ceil(tokens / (BATCH * self.seq_len)), self._batches().steps_per_epoch)

    def calibration_tokens(self, tokens: int) -> int:
        """Return the tokens actually read for a request of `tokens`."""
        return self.calibration_steps(tokens) * BATCH * self.seq_len

    def _batches(self) -> GlobalBatches:
        """Return the sequences of the training split, to calibrate on."""
        return GlobalBatches(self.corpus.train, seq_len=self.seq_len, global_batch=BATCH, seed=0)


def choice_of(saved: Mapping[str, Any], given: str | None) -> DataChoice | None:
    """Choose the text given, or the one in a run's settings; None without either."""
    data = saved.get("data") if given is None else given
    if data is None or data == "none":
        return None
    if given is None or given == saved.get("data"):
        return saved_data_choice(saved)
    return DataChoice(data=given, seq_len=saved.get("seq_len"))
