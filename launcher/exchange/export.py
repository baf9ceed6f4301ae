"""`shardscale export`: the weights of a checkpoint as safetensors, for transformers or bare."""

import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from torch import Tensor

from launcher.checkpoint import Checkpoint, DamagedCheckpoint
from launcher.checkpoint.extra import saved_model
from launcher.checkpoint.files import RangeReader
from launcher.checkpoint.store import candidates
from launcher.config.arguments import one_sentence
from launcher.data.build import TOKENIZER_FILE
from launcher.data.tokenizer import check_vocabulary, load_encoder, tokenizer_key
from launcher.errors import ExitCode, UserError
from launcher.exchange.huggingface import (
    Counterpart,
    counterparts,
    parameter_shapes,
    to_config_json,
)
from launcher.exchange.output import new_folder
from launcher.exchange.progress import which_step
from launcher.exchange.safetensors_files import SINGLE_FILE, Stored, write_safetensors
from launcher.model.config import ModelConfig
from launcher.strategies.flat_shards import PARAM, Shard, element_count

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportOptions:
    """What to export, and how."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """A run folder (its newest checkpoint is taken), or one checkpoint."""
    out: Path
    """Folder to write; must not exist yet."""
    format: Literal["hf", "safetensors"] = "hf"
    """hf: a folder for transformers' from_pretrained. safetensors: the weights under our names."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Type of the weights; checkpoints are fp32."""
    tokenizer: str | None = None
    """hf: a tokenizer.json, byte or hf:NAME in place of the run's own; none leaves it out."""


def main(argv: Sequence[str]) -> int:
    """Export one checkpoint; 0 when it is there, 2 when refused."""
    try:
        with one_sentence():
            options = tyro.cli(
                ExportOptions,
                args=list(argv),
                prog="shardscale export",
                description="Write a checkpoint's weights for other programs.",
            )
        print(export(options))
    except UserError as error:
        print(f"shardscale: {error}", file=sys.stderr)
        return ExitCode.REFUSED
    return ExitCode.DONE


def export(options: ExportOptions) -> str:
    """Write the folder; the line that says what is in it.

    Raises:
        UserError: nothing to export, damaged, or not expressible in the format.
    """
    while True:
        path = _newest(options.run)
        try:
            return _export(Checkpoint.open(path), options)
        except DamagedCheckpoint:
            # A run that is alive saves a newer one and removes this one, with --keep.
            if path == options.run or path.exists():
                raise


def _export(checkpoint: Checkpoint, options: ExportOptions) -> str:
    config = _model_config(checkpoint)
    with new_folder(options.out) as folder, RangeReader(checkpoint) as reader:
        if options.format == "hf":
            said = _write_huggingface(folder, checkpoint, config, reader, options)
        else:
            said = _write_bare(folder, checkpoint, config, reader, options)
    return (
        f"exported {checkpoint.path} to {options.out}: {which_step(checkpoint)}; "
        f"{config.parameter_count:,} parameters, {options.dtype}, {said}"
    )


def _newest(source: Path) -> Path:
    try:
        return candidates(source)[0]
    except UserError as error:
        raise UserError(str(error).removeprefix("--resume ")) from None


def _model_config(checkpoint: Checkpoint) -> ModelConfig:
    """The model that the checkpoint holds, which the run has written beside the weights."""
    model = saved_model(checkpoint.extra)
    if model is None:
        raise UserError(
            f"checkpoint {checkpoint.path}: does not say which model it holds; "
            "export one that launcher.train has saved"
        )
    checkpoint.check_model(parameter_shapes(model), checkpoint.kinds, list(checkpoint.counters))
    return model


def _write_huggingface(
    folder: Path,
    checkpoint: Checkpoint,
    config: ModelConfig,
    reader: RangeReader,
    options: ExportOptions,
) -> str:
    dtype = _DTYPES[options.dtype]
    to_config_json(config, end_of_text=None, dtype=dtype)  # refuses before anything else is read
    tokenizer = _choose_tokenizer(checkpoint, options.tokenizer)
    end_of_text = _write_tokenizer(folder, tokenizer, config) if tokenizer else None
    _write_json(
        folder / "config.json", to_config_json(config, end_of_text=end_of_text, dtype=dtype)
    )
    ends = {"bos_token_id": end_of_text, "eos_token_id": end_of_text}
    _write_json(folder / "generation_config.json", {"_from_model_config": True, **ends})
    tensors = [
        Stored(
            name=found.theirs, shape=found.their_shape, read=partial(_read_theirs, reader, found)
        )
        for found in counterparts(config)
    ]
    write_safetensors(folder / SINGLE_FILE, tensors, dtype=dtype, metadata={"format": "pt"})
    return f"GPT-2 for transformers, {f'tokenizer {tokenizer}' if tokenizer else 'no tokenizer'}"


def _write_bare(
    folder: Path,
    checkpoint: Checkpoint,
    config: ModelConfig,
    reader: RangeReader,
    options: ExportOptions,
) -> str:
    tensors = [
        Stored(name=name, shape=shape, read=partial(_read, reader, name, shape))
        for name, shape in checkpoint.shapes.items()
    ]
    metadata = {
        "format": "pt",
        "step": str(checkpoint.step),
        "model": json.dumps(dataclasses.asdict(config)),
    }
    write_safetensors(
        folder / SINGLE_FILE, tensors, dtype=_DTYPES[options.dtype], metadata=metadata
    )
    return f"our names, {SINGLE_FILE}"


def _read_theirs(reader: RangeReader, found: Counterpart) -> Tensor:
    if found.absent:
        return torch.zeros(found.their_shape)
    return found.turned(_read(reader, found.ours, found.shape))


def _read(reader: RangeReader, name: str, shape: tuple[int, ...]) -> Tensor:
    data = torch.empty(element_count(shape))
    reader.read_into(Shard(name=name, kind=PARAM, shape=shape, start=0, data=data))
    return data.view(shape)


def _choose_tokenizer(checkpoint: Checkpoint, given: str | None) -> str | None:
    """The tokenizer whose ids the model was trained on: the run's own copy, or what is named.

    None where it is left out, or where the model was imported without one.
    """
    if given == "none":
        return None
    run = checkpoint.path.absolute().parent.parent
    if given is None and (run / TOKENIZER_FILE).exists():
        return str(run / TOKENIZER_FILE)
    choice: str | None = given or checkpoint.extra.get("config", {}).get("tokenizer")
    if choice == "bpe":
        # Training it again would give another one wherever the text has changed since.
        raise UserError(
            f"{run}: has no {TOKENIZER_FILE}, and the one that was trained for it is found nowhere "
            "else; give --tokenizer FILE, or --tokenizer none to leave it out"
        )
    return choice


def _write_tokenizer(folder: Path, tokenizer: str, config: ModelConfig) -> int:
    """Write what AutoTokenizer reads; the id of the end-of-text token.

    Raises:
        UserError: there is no such tokenizer, it is not the model's, or transformers has no file
            for it.
    """
    tokenizer_key(tokenizer, config.vocab_size)  # refuses what does not exist
    encoder = load_encoder(tokenizer)
    check_vocabulary(tokenizer, encoder.vocab_size, config.vocab_size)
    path = folder / TOKENIZER_FILE
    encoder.save(path)
    if not path.exists():
        raise UserError(
            f"tokenizer {tokenizer} cannot be written as a {TOKENIZER_FILE}: "
            "give --tokenizer none to leave it out"
        )
    from tokenizers import Tokenizer

    end_of_text = Tokenizer.from_file(str(path)).id_to_token(encoder.end_of_text)
    document = {
        # The class that takes tokenizer.json as it is; GPT2Tokenizer would build its own.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": end_of_text,
        "eos_token": end_of_text,
        "model_max_length": config.context,
        # transformers 4 would add token_type_ids, which GPT-2 takes for further token embeddings.
        "model_input_names": ["input_ids", "attention_mask"],
        "clean_up_tokenization_spaces": False,
    }
    _write_json(folder / "tokenizer_config.json", document)
    return encoder.end_of_text


def _write_json(path: Path, document: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
