"""Messages to text by the chat template of a tokenizer, and where in it the assistant speaks."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from launcher.data.examples import Document
from launcher.data.formats import string_of
from launcher.data.hub import HUB_PREFIX
from launcher.data.tokenizer import load_from_transformers
from launcher.util.errors import UserError

_TEMPLATE_FILES = ("tokenizer_config.json", "chat_template.jinja")
_KNOWN_ROLES = frozenset({"system", "user", "assistant", "tool"})


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatTemplate:
    """The chat template of one of transformers' tokenizers."""

    name: str
    tokenizer: Any
    end_of_turn: re.Pattern[str]
    """What may follow an assistant's words and is learned with them: one special token."""

    @classmethod
    def of(cls, tokenizer: str, data: str) -> Self:
        """That of `--tokenizer`, for the messages of `--data`.

        Raises:
            UserError: it has none, or cannot be loaded.
        """
        source = tokenizer
        if template_files(tokenizer):
            source = f"{HUB_PREFIX}{Path(tokenizer).expanduser().parent}"
        elif not tokenizer.startswith(HUB_PREFIX):
            raise UserError(
                f"--data {data} holds messages, and --tokenizer {tokenizer} has no chat template: "
                "give --tokenizer hf:NAME, of a chat model on the Hub or in a local folder"
            )
        loaded = load_from_transformers(source)
        if not loaded.chat_template:
            raise UserError(
                f"--data {data} holds messages, and --tokenizer {tokenizer} has no chat template: "
                "give the tokenizer of a chat model"
            )
        special = {*loaded.all_special_tokens}
        special |= {t.content for t in loaded.added_tokens_decoder.values() if t.special}
        longest_first = sorted(map(re.escape, special), key=len, reverse=True)
        pattern = re.compile(rf"\s*(?:{'|'.join(longest_first)})")
        return cls(name=tokenizer, tokenizer=loaded, end_of_turn=pattern)

    def document(self, record: dict[str, Any], where: str) -> Document:
        """A record's `messages` (and `tools`) as transformers would write them; what is learned is
        each assistant's content, up to the token that ends the turn.

        Raises:
            UserError: no messages, none of an assistant, or the template refuses them.
        """
        messages = _messages_of(record, where)
        tools = record.get("tools")
        text = self._written(messages, tools, where)
        mark = next(c for c in map(chr, range(0xE000, 0xF900)) if c not in text)
        learned = []
        for number, message in enumerate(messages):
            spoken = message["role"] == "assistant"
            if not spoken and message["role"] in _KNOWN_ROLES:
                continue
            marked = [*messages[:number], {**message, "content": mark}, *messages[number + 1 :]]
            span = _place(text, self._written(marked, tools, where), mark)
            if span is None:
                raise UserError(
                    f"{where}: the chat template of {self.name} leaves out or changes message "
                    f"{number + 1}, of role {message['role']!r:.40}: correct or remove the line"
                )
            begin, end = span
            following = self.end_of_turn.match(text, end)
            if spoken:
                learned.append((begin, end if following is None else following.end()))
        return Document(text, tuple(learned), ends_itself=True)

    def _written(self, messages: list[dict[str, Any]], tools: Any, where: str) -> str:
        try:
            text: str = self.tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
        except Exception as error:  # a template can raise anything, on purpose or not
            reason = " ".join(str(error).split())
            raise UserError(
                f"{where}: the chat template of {self.name} refuses the messages ({reason:.100}): "
                "correct or remove the line"
            ) from error
        return text


def template_files(tokenizer: str) -> list[Path]:
    """The files beside a tokenizer.json that transformers has its chat template in, if any."""
    path = Path(tokenizer).expanduser()
    beside = (path.with_name(name) for name in _TEMPLATE_FILES)
    return [file for file in beside if file.is_file()] if path.is_file() else []


def _messages_of(record: dict[str, Any], where: str) -> list[dict[str, Any]]:
    messages = record["messages"]
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        raise UserError(
            f"{where}: 'messages' is {messages!r:.40}, it must be a list of objects with role and "
            "content"
        )
    found = []
    for number, message in enumerate(messages, start=1):
        here = f"{where}, message {number}"
        texts = {field: string_of(message, field, here) for field in ("role", "content")}
        if texts["role"] == "assistant" and not texts["content"].strip():
            raise UserError(
                f"{here}: the assistant's content is empty, so there is nothing to learn: write "
                "it, or remove the line"
            )
        found.append({**message, **texts})
    if not any(message["role"] == "assistant" for message in found):
        raise UserError(
            f"{where}: no message is of role assistant, so there is nothing to learn: add one, or "
            "remove the line"
        )
    return found


def _place(text: str, marked: str, mark: str) -> tuple[int, int] | None:
    """Where `text` has what stands in `marked` as the mark; None where that cannot be told.

    A template may write more for some contents, as reasoning before an answer: that belongs to it.
    """
    before, found, after = marked.partition(mark)
    if not found or mark in after or not text.endswith(after):
        return None
    begin = len(before)
    if not text.startswith(before):
        pairs = enumerate(zip(text, before, strict=False))
        begin = next((n for n, (a, b) in pairs if a != b), min(len(text), len(before)))
    end = len(text) - len(after)
    return (begin, end) if begin < end else None
