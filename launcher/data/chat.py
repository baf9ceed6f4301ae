"""Chat messages as text, by a tokenizer's chat template, with the assistant's spans to learn."""

from __future__ import annotations

import contextlib
import json
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from launcher.data.files import HUB_PREFIX, template_files
from launcher.data.formats import Document, is_messages, string_of, without_surrogates
from launcher.data.hub import load_from_transformers
from launcher.util.errors import UserError

_KNOWN_ROLES = frozenset({"system", "user", "assistant", "tool"})


@dataclass(frozen=True, kw_only=True)
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
        # a pattern takes the first alternative that matches, and one token may begin another
        longest_first = sorted(map(re.escape, special), key=len, reverse=True)
        pattern = re.compile(rf"\s*(?:{'|'.join(longest_first)})")
        return cls(name=tokenizer, tokenizer=loaded, end_of_turn=pattern)

    def document(self, record: dict[str, Any], where: str) -> Document:
        """Render a record's `messages` (and `tools`) as transformers does; each assistant's turn is
        learned, its tool calls too, from where it is asked to speak up to the token that ends it.

        Raises:
            UserError: no messages, none of an assistant, or the template rejects them.
        """
        messages = _messages_of(record, where)
        if any(message.get("tool_calls") for message in messages) and self._takes_objects:
            messages = _encodable(_with_objects(messages))
        tools = _encodable(_decoded(record.get("tools")))
        text = self._render(messages, tools, where)
        learned = []
        for number, message in enumerate(messages):
            spoken = message["role"] == "assistant"
            # A role beyond these is looked for in the text, as templates may drop it silently.
            if not spoken and message["role"] in _KNOWN_ROLES:
                continue
            calls = bool(message.get("tool_calls"))
            span = None
            if (message["content"] or "").strip():
                span = self._content(messages, number, tools, text, where)
            begin = self._asked(messages[:number], tools, text) if spoken else None
            if begin is not None and (calls if span is None else begin < span[1]):
                # The model also generates what a template puts before an answer: an empty thought.
                span = (begin, begin if span is None else span[1])
            end = None if span is None else self._end_of_turn(text, span[1])
            if calls and span is not None:
                rest = range(number + 1, len(messages))
                spans = (self._content(messages, n, tools, text, where) for n in rest)
                limit = next((found[0] for found in spans if found is not None), len(text))
                end = self._end_of_calls(text, span[1], limit)
            if span is None or end is None:
                raise UserError(
                    f"{where}: the chat template of {self.name} leaves out or changes message "
                    f"{number + 1}, of role {message['role']!r:.40}: correct or remove the line"
                )
            if spoken and message.get("weight") != 0:  # OpenAI's mark of what is not to be learned
                learned.append((span[0], end))
        return Document(text, tuple(learned), ends_itself=True)

    def _asked(self, messages: list[dict[str, Any]], tools: Any, text: str) -> int | None:
        """Return the place in the rendered text where the answer to `messages` begins; None where a
        template writes them differently when nothing follows, or does not ask for an answer."""
        if not messages or not self._asks:
            return None
        try:
            asked = self._render(messages, tools, "", add_generation_prompt=True)
        except UserError:
            return None
        return len(asked) if text.startswith(asked) else None

    @cached_property
    def _asks(self) -> bool:
        """The template has a generation prompt."""
        asked = [{"role": "user", "content": "a"}]
        return self.prompt(asked) != self._render(asked, None, "the chat")

    @cached_property
    def _takes_objects(self) -> bool:
        """The template writes arguments of calls as JSON, so it would quote those that are texts of
        JSON, as OpenAI's are; DeepSeek's takes only such."""
        texts = []
        given: tuple[Any, ...] = ("{}", {})
        for arguments in given:
            function = {"name": "a", "arguments": arguments}
            call = {"type": "function", "id": "abcdefghi", "function": function}
            answer = {"role": "assistant", "content": "", "tool_calls": [call]}
            try:
                texts.append(self._render([{"role": "user", "content": "a"}, answer], None, ""))
            except UserError:
                texts.append("")
        return '"{}"' in texts[0] if texts[0] else texts[1] != ""

    def _content(
        self, messages: list[dict[str, Any]], number: int, tools: Any, text: str, where: str
    ) -> tuple[int, int] | None:
        """Return the span of a message's content in the rendered text, or None."""
        # a private-use character that the text lacks: replacing the content by it shows its place
        mark = next(c for c in map(chr, range(0xE000, 0xF900)) if c not in text)
        message = {**messages[number], "content": mark}
        marked = [*messages[:number], message, *messages[number + 1 :]]
        return _place(text, self._render(marked, tools, where), mark)

    def _end_of_turn(self, text: str, end: int) -> int:
        """Return the end of the special token behind a content that ends at `end`."""
        following = self.end_of_turn.match(text, end)
        return end if following is None else following.end()

    def _end_of_calls(self, text: str, end: int, limit: int) -> int | None:
        """Return the end of the turn whose calls of tools are between `end` and `limit`, where the
        next content begins; None if no special token ends it."""
        token = self._turn_end
        if token is not None and (found := text.find(token, end, limit)) >= 0:
            return found + len(token)
        other = self.end_of_turn.search(text, end, limit)  # Llama's <|eom_id|>
        return None if other is None else other.end()

    def prompt(self, messages: list[dict[str, str]]) -> str:
        """Render messages up to where the assistant's answer begins.

        Raises:
            UserError: the template rejects them.
        """
        return self._render(messages, None, "the chat", add_generation_prompt=True)

    def turn_ends(self) -> set[int]:
        """Return the tokens that end an assistant's turn: the template's, and the tokenizer's."""
        ends = {self.tokenizer.eos_token_id}
        if self._turn_end is not None:
            ends.add(self.tokenizer.convert_tokens_to_ids(self._turn_end))
        return {int(token) for token in ends if token is not None}

    @cached_property
    def _turn_end(self) -> str | None:
        """The special token after an answer."""
        mark = chr(0xE000)
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": mark}]
        after = self._render(turns, None, "the chat").partition(mark)[2]
        found = self.end_of_turn.match(after)
        return None if found is None else found[0].strip()

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
    if not is_messages(messages):
        raise UserError(
            f"{where}: 'messages' is {messages!r:.40}, it must be a list of objects with role and "
            "content"
        )
    found = []
    for number, message in enumerate(messages, start=1):
        here = f"{where}, message {number}"
        calls = bool(message.get("tool_calls"))
        silent = calls and message.get("content") is None  # OpenAI's form of a call
        texts: dict[str, str | None] = {"role": string_of(message, "role", here)}
        texts["content"] = None if silent else _content_of(message, here)
        spoken = texts["role"] == "assistant"
        if spoken and not calls and not (texts["content"] or "").strip():
            raise UserError(
                f"{here}: the assistant's content is empty, so there is nothing to learn: write "
                "it, or remove the line"
            )
        # templates ask whether a message has calls, and OpenAI's say null where it has none
        fields = {name: part for name, part in message.items() if part is not None}
        found.append({**_encodable(fields), **texts})
    if not any(message["role"] == "assistant" for message in found):
        raise UserError(
            f"{where}: no message is of role assistant, so there is nothing to learn: add one, or "
            "remove the line"
        )
    return found


def _with_objects(value: Any) -> Any:
    """Return messages with the arguments of their calls as objects, where they are texts of one."""
    if isinstance(value, list):
        return list(map(_with_objects, value))
    if not isinstance(value, dict):
        return value
    return {
        n: _decoded(part) if n == "arguments" else _with_objects(part) for n, part in value.items()
    }


def _decoded(value: Any) -> Any:
    """Return the object or list that a text of JSON holds; any other value as it is."""
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(value)
    return value


def _encodable(value: Any) -> Any:
    """Return a decoded JSON value without lone surrogates, which calls of tools can hold, too."""
    if isinstance(value, str):
        return without_surrogates(value)
    if isinstance(value, list):
        return [_encodable(element) for element in value]
    if isinstance(value, dict):
        return {_encodable(name): _encodable(element) for name, element in value.items()}
    return value


def _content_of(message: dict[str, Any], where: str) -> str:
    """Return a message's content, joined where it is a list of texts, as OpenAI's may be.

    Raises:
        UserError: it is missing, or is or has something else than text.
    """
    parts = message.get("content")
    if not isinstance(parts, list):
        return string_of(message, "content", where)
    texts = []
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else part
        if kind != "text":
            raise UserError(
                f"{where}: its content holds {kind!r:.40}, and only text is learned: remove the "
                "line, or that part"
            )
        texts.append(string_of(part, "text", where))
    return "".join(texts)


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
