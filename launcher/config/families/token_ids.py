"""Token ids that files of transformers name: those that begin, end and pad a text."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from launcher.util.errors import UserError

ENDS: Final = ("bos_token_id", "eos_token_id", "pad_token_id")
_OTHERS: Final = (
    *("sep_token_id", "unk_token_id", "decoder_start_token_id"),
    *("forced_bos_token_id", "forced_eos_token_id"),
)
_MAY_BE_SEVERAL: Final = ("eos_token_id", "forced_eos_token_id")
_NO_PADDING: Final = -1
"""What the first Llamas have as `pad_token_id`."""


def check_token_ids(document: Mapping[str, Any], vocab_size: int, path: Path) -> None:
    """Refuse ids that the model does not have; null is none.

    Args:
        document: what config.json or generation_config.json holds.
        path: the file, for the messages.

    Raises:
        UserError: naming the first of them.
    """
    for name in (*ENDS, *_OTHERS):
        value = document.get(name)
        if value is None or (name == "pad_token_id" and value == _NO_PADDING):
            continue
        several = isinstance(value, list) and name in _MAY_BE_SEVERAL
        for token in value if several else [value]:
            if type(token) is not int or not 0 <= token < vocab_size:
                raise UserError(
                    f"{path}: {name} is {value!r}, but must be null or a token id from 0 to "
                    f"{vocab_size - 1}, the vocabulary's last: correct it"
                )
