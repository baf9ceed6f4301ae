"""A model and its tokenizer for inference, from any folder of weights."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from launcher.checkpoint.pretrained.companions import (
    choose_tokenizer,
    read_generation_config,
)
from launcher.checkpoint.pretrained.folder_weights import Stored
from launcher.checkpoint.pretrained.peft import companions_beside
from launcher.checkpoint.pretrained.stored import open_stored
from launcher.checkpoint.pretrained.transformed import Merged
from launcher.config.families.base import check_token_ids
from launcher.config.init_from import HF_CONFIG, tokenizer_in
from launcher.config.transformers_config import require_own, require_transformers
from launcher.data.tokenizer import Encoder, check_vocabulary, load_encoder, tokenizer_key
from launcher.model.build import new_decoder, prepare
from launcher.model.config import ModelConfig
from launcher.model.gpt import GPT
from launcher.strategies.build_inputs import materialize_whole, place_buffers
from launcher.util.errors import UserError
from launcher.util.hub_cache import existing_model
from launcher.util.json_file import read_json

if TYPE_CHECKING:
    from launcher.model.foreign.decoder import ForeignDecoder


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Weights in a folder, and the tokenizer that belongs to them."""

    config: ModelConfig
    read: Callable[[str], Tensor]
    """Our parameter of that name, in its shape."""
    tokenizer: Callable[[], str | None]
    """Returns their tokenizer; raises UserError where it is lost."""
    beside: Path
    """Folder of the model's other files."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Vocabulary:
    """A model's tokenizer and the tokens that end a text."""

    encoder: Encoder
    ends: Collection[int]
    """Tokens that end a text."""
    rows: int
    """Tokens that the model's embedding has a row for."""

    def check(self, tokens: Sequence[int]) -> None:
        """Refuse a prompt with an added token that the model has no row for.

        Raises:
            UserError: naming the token.
        """
        if (highest := max(tokens, default=0)) >= self.rows:
            raise UserError(
                f"the prompt has {self.encoder.decode([highest], special=True)!r}, whose id "
                f"{highest} is beyond the model's vocabulary of {self.rows}: leave it out"
            )


@contextmanager
def open_source(folder: Path) -> Iterator[Source]:
    """Open a run, a checkpoint, a model of transformers (hf:ORG/NAME: from the Hub's cache), or
    adapters of PEFT; reads no weights yet.

    Raises:
        UserError: the folder holds none of them, or is damaged.
    """
    folder = existing_model(folder)
    with open_stored(folder) as stored:
        require_transformers(stored.config, f"{folder}: this command")
        model: Stored | Merged = stored if stored.config.lora is None else Merged(stored)
        checkpoint = model.checkpoint
        if checkpoint is None:
            beside = folder if (folder / HF_CONFIG).is_file() else companions_beside(folder)
            tokenizer = partial(tokenizer_in, beside)
        else:
            beside = checkpoint.run_folder
            tokenizer = partial(choose_tokenizer, checkpoint, None)
        yield Source(config=model.config, read=model.read, tokenizer=tokenizer, beside=beside)


def _ends_in(folder: Path, vocab_size: int) -> set[int]:
    """Return the tokens that end a text, from config.json and generation_config.json, which often
    lists more.

    Raises:
        UserError: the model has no such tokens.
    """
    path = folder / HF_CONFIG
    config = read_json(path) if path.is_file() else {}
    check_token_ids(config, vocab_size, path)
    documents = (config, read_generation_config(folder, vocab_size) or {})
    named = [document.get("eos_token_id") for document in documents]
    listed = [ids if isinstance(ids, list) else [ids] for ids in named]
    return {token for ids in listed for token in ids if token is not None}


def vocabulary(source: Source, given: str | None) -> Vocabulary:
    """Return the vocabulary of the `given` tokenizer, or of the weights' own.

    Raises:
        UserError: there is none, or it is not the model's.
    """
    choice = given or source.tokenizer()
    if choice is None:
        raise UserError(
            "the model came without a tokenizer: give --tokenizer FILE, byte or hf:NAME"
        )
    if choice == "bpe":
        raise UserError(
            "--tokenizer bpe is trained on a run's data: give the tokenizer.json that it wrote"
        )
    size = source.config.vocab_size
    tokenizer_key(choice, size)  # refuses what does not exist
    encoder = load_encoder(choice)
    check_vocabulary(choice, encoder.rows, size)
    ends = {encoder.end_of_text, *_ends_in(source.beside, size)}
    return Vocabulary(encoder=encoder, ends=ends, rows=size)


def chosen_device(wanted: str) -> torch.device:
    """Resolve `auto`, `cpu` or `cuda`.

    Raises:
        UserError: `cuda` without a GPU.
    """
    has_gpu = torch.cuda.is_available()
    if wanted == "cuda" and not has_gpu:
        raise UserError("--device cuda: this machine has no GPU; give --device cpu")
    return torch.device("cuda" if has_gpu and wanted != "cpu" else "cpu")


def build(source: Source | Stored | Merged, *, device: torch.device, dtype: torch.dtype) -> GPT:
    """Build our own decoder with its weights for inference, as `build_any` does.

    Raises:
        UserError: transformers computes this model.
    """
    require_own(source.config, "this command")
    return cast(GPT, build_any(source, device=device, dtype=dtype))


def build_any(
    source: Source | Stored | Merged, *, device: torch.device, dtype: torch.dtype
) -> "GPT | ForeignDecoder":
    """Build the model with its weights for inference; the peak is the model and one more tensor.

    Attention is chosen for this machine, which may lack the kernels of training.
    """
    config = replace(source.config, attention="auto", sdpa_backend="auto")
    prepare(config)
    with torch.device("meta"):
        model = new_decoder(config)
    materialize_whole(model, lambda name, shape: source.read(name), device=device, dtype=dtype)
    place_buffers(model, device)
    return cast("GPT | ForeignDecoder", model.eval().requires_grad_(False))
