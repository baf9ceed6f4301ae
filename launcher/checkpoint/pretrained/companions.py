"""Small files beside weights: tokenizer, chat template, generation config."""

import contextlib
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from launcher.checkpoint import Checkpoint
from launcher.checkpoint.pretrained.weight_files import write_json
from launcher.config.families.base import ENDS, check_token_ids
from launcher.data.files import (
    CHAT_TEMPLATE_FILE,
    HUB_PREFIX,
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
    copy_files,
    files_beside,
)
from launcher.data.tokenizer import check_vocabulary, load_encoder, tokenizer_key
from launcher.model.config import ModelConfig
from launcher.util.errors import UserError
from launcher.util.json_file import json_object, read_json

GENERATION_FILE = "generation_config.json"


def carry_beside(tokenizer: str, run: Path) -> bool:
    """Copy the files beside a tokenizer.json into a run, for its exports; returns whether the
    tokenizer's configuration is among them.

    Raises:
        OSError: something cannot be written.
    """
    given = Path(tokenizer).expanduser()
    if given.name != TOKENIZER_FILE or not given.is_file():
        return False
    _carry(given.parent, run)
    return (given.parent / TOKENIZER_CONFIG_FILE).is_file()


def _carry(source: Path, target: Path) -> None:
    if source.resolve() == target.resolve():
        return
    own = source / GENERATION_FILE
    copy_files([*([own] if own.is_file() else []), *files_beside(source)], source, target)
    if (target / GENERATION_FILE).exists() or not (source / "config.json").is_file():
        return
    # Older folders name the tokens that end a text in config.json only.
    document = read_json(source / "config.json")
    ends: dict[str, Any] = {key: document[key] for key in ENDS if key in document}
    if ends:
        write_json(target / GENERATION_FILE, {"_from_model_config": True, **ends})


def carry_in(folder: Path, run: Path) -> None:
    """Copy them from a folder of transformers.

    Raises:
        UserError: the tokenizer is a program.
    """
    path = folder / TOKENIZER_CONFIG_FILE
    if path.exists() and read_json(path).get("auto_map") is not None:
        raise UserError(
            f"{path}: auto_map names code that comes with the tokenizer, which is never run; take "
            f"auto_map out if {TOKENIZER_FILE} does without it"
        )
    _carry(folder, run)


def read_generation_config(folder: Path, vocab_size: int) -> dict[str, Any] | None:
    """Read a folder's generation_config.json; None without one.

    Raises:
        UserError: it is damaged, or names tokens that the model does not have.
    """
    path = folder / GENERATION_FILE
    if not path.exists():
        return None
    document = read_json(path)
    check_token_ids(document, vocab_size, path)
    return document


def generation_config(
    places: Sequence[Path], end_of_text: int | None, vocab_size: int
) -> dict[str, Any]:
    """Return the first folder's generation config, or one with the end-of-text token.

    Raises:
        UserError: as of `read_generation_config`.
    """
    for place in places:
        found = read_generation_config(place, vocab_size)
        if found is not None:
            return found
    ends = {"bos_token_id": end_of_text, "eos_token_id": end_of_text}
    return {"_from_model_config": True, **ends}


def with_turn_ends(
    generation: Mapping[str, Any], folder: Path, vocab_size: int
) -> Mapping[str, Any]:
    """Return a generation config that also ends where the chat template beside a tokenizer.json
    ends an answer: those of base models name the end of a text alone, and nothing would stop what
    has learned to end its turns."""
    named = json_object(folder / TOKENIZER_CONFIG_FILE).get("chat_template")
    if named is None and not (folder / CHAT_TEMPLATE_FILE).is_file():
        return generation
    from launcher.data.chat import ChatTemplate

    first = generation.get("eos_token_id")
    ends = first if isinstance(first, list) else [] if first is None else [first]
    with contextlib.suppress(UserError):  # no transformers, or a template of another kind
        found = ChatTemplate.find(str(folder / TOKENIZER_FILE))
        more = set() if found is None else found.turn_ends().difference(ends)
        ends = [*ends, *sorted(token for token in more if token < vocab_size)]
    return {**generation, "eos_token_id": ends} if ends[1:] else generation


def ends_of(generation: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tokens that begin and end a text, for config.json.

    None is written out, too: a missing key would mean the family's default.
    """
    first, last, padding = ENDS
    ends = {key: generation.get(key) for key in (first, last)}
    return ends | ({padding: generation[padding]} if padding in generation else {})


def choose_tokenizer(checkpoint: Checkpoint, given: str | None) -> str | None:
    """Return the tokenizer that the model was trained with: the one given, or the run's own copy.

    None for "none", and for a model that was imported without a tokenizer.
    """
    if given == "none":
        return None
    run = checkpoint.run_folder
    if given is None and (run / TOKENIZER_FILE).exists():
        return str(run / TOKENIZER_FILE)
    choice: str | None = given or checkpoint.extra.get("config", {}).get("tokenizer")
    if choice == "bpe":
        # Training it again would give another one wherever the text has changed since.
        raise UserError(
            f"{run}: has no {TOKENIZER_FILE}, and the one that was trained for it is found nowhere "
            "else; give --tokenizer FILE, or export with --tokenizer none"
        )
    return choice


def write_tokenizer(folder: Path, tokenizer: str, config: ModelConfig) -> int:
    """Write a tokenizer for AutoTokenizer; returns the id of its end-of-text token.

    Raises:
        UserError: there is no such tokenizer, it is not the model's, or transformers has no file
            for it.
    """
    tokenizer_key(tokenizer, config.vocab_size)  # refuses what does not exist
    encoder = load_encoder(tokenizer)
    check_vocabulary(tokenizer, encoder.rows, config.vocab_size)
    path = folder / TOKENIZER_FILE
    if carry_beside(tokenizer, folder):
        shutil.copyfile(Path(tokenizer).expanduser(), path)
        return encoder.end_of_text
    encoder.save(path)
    if not path.exists():
        raise UserError(
            f"tokenizer {tokenizer} cannot be written as a {TOKENIZER_FILE}: "
            "give --tokenizer none to leave it out"
        )
    if tokenizer.startswith(HUB_PREFIX):
        from launcher.data.hub import save_beside

        save_beside(tokenizer, folder)
        return encoder.end_of_text
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
    write_json(folder / TOKENIZER_CONFIG_FILE, document)
    return encoder.end_of_text
