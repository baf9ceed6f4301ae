"""Ids of a tokenizer's tokens: one for each, and those that its file says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from launcher.util.errors import UserError

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def id_count(tokenizer: Tokenizer, name: str) -> int:
    """One more than the largest id: vocabularies can have holes.

    Raises:
        UserError: two tokens have one id.
    """
    tokens: dict[int, str] = {}
    for token, number in tokenizer.get_vocab(with_added_tokens=True).items():
        if number in tokens:
            raise UserError(
                f"tokenizer {name}: {tokens[number]!r} and {token!r} both have id {number}: save "
                "it again with the tokenizers library"
            )
        tokens[number] = token
    return max(tokens) + 1


def check_added(document: Mapping[str, Any], loaded: Tokenizer, name: str) -> None:
    """Refuse a tokenizer.json whose added tokens get other ids than it says, as the library gives
    them the next free ones.

    Raises:
        UserError: naming the first of them.
    """
    for token in document.get("added_tokens") or ():
        given = loaded.token_to_id(token["content"])
        if given != token["id"]:
            raise UserError(
                f"tokenizer {name}: added token {token['content']!r} has id {token['id']}, and "
                f"would get {given}: correct the id"
            )
