"""Chat messages as text, by a tokenizer's chat template, with the assistant's spans to learn."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from launcher.data.files import HUB_PREFIX, template_files
from launcher.data.formats import Document, string_of
from launcher.data.hub import load_from_transformers
from launcher.util.errors import UserError

_KNOWN_ROLES = frozenset({"system", "user", "assistant", "tool"})


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatTemplate:
    """The chat template of one of transformers' tokenizers."""

    name: str
    tokenizer: Any
    end_of_turn: re.Pattern[str]
    """The special token after an assistant's words, which is learned with them."""

    @classmethod
    def of(cls, tokenizer: str, data: str) -> Self:
        """Load the template of `--tokenizer`, for the messages of `--data`.

        Raises:
            UserError: it has none, or cannot be loaded.
        """
        found = cls.find(tokenizer)
        if found is None:
            raise UserError(
                f"--data {data} holds messages, and --tokenizer {tokenizer} has no chat template: "
                "give --tokenizer hf:NAME, of a chat model on the Hub or in a local folder"
            )
        return found

    @classmethod
    def find(cls, tokenizer: str) -> Self | None:
        """Load the template of a tokenizer, or return None if it has none.

        Raises:
            UserError: it cannot be loaded.
        """
        source = tokenizer
        if template_files(tokenizer):
            source = f"{HUB_PREFIX}{Path(tokenizer).expanduser().parent}"
        elif not tokenizer.startswith(HUB_PREFIX):
            return None
        loaded = load_from_transformers(source)
        if not loaded.chat_template:
            return None
        special = {*loaded.all_special_tokens}
        special |= {t.content for t in loaded.added_tokens_decoder.values() if t.special}
        longest_first = sorted(map(re.escape, special), key=len, reverse=True)
        pattern = re.compile(rf"\s*(?:{'|'.join(longest_first)})")
        return cls(name=tokenizer, tokenizer=loaded, end_of_turn=pattern)

    def document(self, record: dict[str, Any], where: str) -> Document:
        """Render a record's `messages` (and `tools`) as transformers does; each assistant's content
        is learned, up to the token that ends the turn.

        Raises:
            UserError: no messages, none of an assistant, or the template rejects them.
        """
        messages = _messages_of(record, where)
        tools = record.get("tools")
        text = self._render(messages, tools, where)
        mark = next(c for c in map(chr, range(0xE000, 0xF900)) if c not in text)
        learned = []
        for number, message in enumerate(messages):
            spoken = message["role"] == "assistant"
            if not spoken and message["role"] in _KNOWN_ROLES:
                continue
            marked = [*messages[:number], {**message, "content": mark}, *messages[number + 1 :]]
            span = _place(text, self._render(marked, tools, where), mark)
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

    def prompt(self, messages: list[dict[str, str]]) -> str:
        """Render messages up to where the assistant's answer begins.

        Raises:
            UserError: the template rejects them.
        """
        return self._render(messages, None, "the chat", add_generation_prompt=True)

    def turn_ends(self) -> set[int]:
        """Return the tokens that end an assistant's turn: the template's, and the tokenizer's."""
        mark = chr(0xE000)
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": mark}]
        after = self._render(turns, None, "the chat").partition(mark)[2]
        found = self.end_of_turn.match(after)
        ends = {self.tokenizer.eos_token_id}
        if found is not None:
            ends.add(self.tokenizer.convert_tokens_to_ids(found[0].strip()))
        return {int(token) for token in ends if token is not None}

    def _render(
        self, messages: list[dict[str, Any]], tools: Any, where: str, **options: Any
    ) -> str:
        try:
            text: str = self.tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, **options
            )
        except Exception as error:  # a template can raise anything, on purpose or not
            reason = " ".join(str(error).split())
            raise UserError(
                f"{where}: the chat template of {self.name} refuses the messages ({reason:.100}): "
                "correct or remove the line"
            ) from error
        return text


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
    """Return the span of `text` that replaces the mark in `marked`; None where it is ambiguous.

    A template may add to some contents, such as reasoning before an answer: that is included.
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
