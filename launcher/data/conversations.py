"""Examples of other programs as ours: those of Alpaca, ShareGPT and TRL."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from typing import Any, Final

from launcher.data.chat import ChatTemplate
from launcher.data.formats import (
    Document,
    Form,
    ReadExample,
    is_messages,
    reject_pair,
    string_of,
    with_prompt,
)
from launcher.util.errors import UserError

# github.com/tatsu-lab/stanford_alpaca, train.py: PROMPT_DICT.
_BELOW: Final = "Below is an instruction that describes a task"
_RESPOND: Final = "Write a response that appropriately completes the request."
_PROMPT: Final = f"{_BELOW}. {_RESPOND}\n\n### Instruction:\n{{instruction}}\n\n### Response:"
_PROMPT_WITH_INPUT: Final = (
    f"{_BELOW}, paired with an input that provides further context. {_RESPOND}\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:"
)
_CALL: Final = "function_call"
"""LLaMA-Factory's name of a turn whose value is a call of a tool, or a list of calls, as JSON."""
_ROLES: Final = {
    **{"human": "user", "user": "user", "system": "system"},
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "model", "bot"), "assistant"),
    **{"observation": "tool", "tool": "tool"},
    **{_CALL: "assistant"},
}
"""ShareGPT's name of a speaker -> role."""


def example_reader(form: Form, tokenizer: str, data: str) -> ReadExample:
    """Return the function that makes a document of a record of `--data`.

    Raises:
        UserError: conversations, and `--tokenizer` has no chat template.
    """
    read = _reader_of(form, tokenizer, data)

    def checked(record: dict[str, Any], where: str) -> Document:
        if record.get("label") is False:  # TRL's and LLaMA-Factory's mark of a bad answer (KTO)
            raise UserError(
                f"{where}: 'label' is false, so its answer is a bad one, which fine-tuning would "
                "learn: keep only the examples whose label is true"
            )
        if "completion" not in record:
            reject_pair(record, where)
        return read(record, where)

    return checked


def _reader_of(form: Form, tokenizer: str, data: str) -> ReadExample:
    if form == "completions":
        # The columns of a dataset do not say that they hold messages.
        template_of = functools.cache(lambda: ChatTemplate.of(tokenizer, data))
        return lambda record, where: (
            template_of().document(turns_messages(record, where), where)
            if is_messages(record.get("prompt"))
            else with_prompt(record, where)
        )
    template = (
        ChatTemplate.find(tokenizer) if form == "alpaca" else ChatTemplate.of(tokenizer, data)
    )
    if template is None:
        return lambda record, where: with_prompt(alpaca_prompt(record, where), where)
    document = template.document
    if form == "messages":
        return document
    as_messages = _AS_MESSAGES[form]
    return lambda record, where: document(as_messages(record, where), where)


def alpaca_prompt(record: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a record of instruction, input and output as prompt and completion.

    Raises:
        UserError: it has more turns, which this form has no place for.
    """
    if more := next(filter(record.get, ("system", "history")), None):
        raise UserError(
            f"{where}: has a {more!r}, which only a chat template writes: give --tokenizer hf:NAME "
            "of a chat model, or remove that field"
        )
    instruction, given, output = _alpaca(record, where)
    prompt = _PROMPT_WITH_INPUT if given else _PROMPT
    return {"prompt": prompt.format(instruction=instruction, input=given), "completion": output}


def alpaca_messages(record: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a record of instruction, input and output as messages, behind those of its `history`,
    a list of pairs as LLaMA-Factory reads them.

    Raises:
        UserError: the history holds something else.
    """
    instruction, given, output = _alpaca(record, where)
    messages = []
    if record.get("system"):
        messages.append({"role": "system", "content": string_of(record, "system", where)})
    for pair in record.get("history") or ():
        if not (isinstance(pair, list) and [type(text) for text in pair] == [str, str]):
            raise UserError(
                f"{where}: 'history' holds {pair!r:.40}, it must be a list of pairs of texts, an "
                "instruction and its output"
            )
        messages += _asked_and_answered(*pair)
    asked = f"{instruction}\n\n{given}" if given else instruction
    return {"messages": [*messages, *_asked_and_answered(asked, output)]}


def _asked_and_answered(asked: str, answer: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]


def _alpaca(record: dict[str, Any], where: str) -> tuple[str, str, str]:
    given = string_of(record, "input", where) if record.get("input") is not None else ""
    instruction, output = (string_of(record, name, where) for name in ("instruction", "output"))
    return instruction, given, output


def turns_messages(record: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a record whose prompt and completion are messages (TRL's) as messages, of which those
    of the completion are learned.

    Raises:
        UserError: the completion is no list of messages.
    """
    asked, answers = record["prompt"], record.get("completion")
    if not is_messages(answers):
        raise UserError(
            f"{where}: 'completion' is {answers!r:.40}, it must be a list of messages, each with "
            "role and content, as the prompt"
        )
    messages = [{**turn, "weight": 0} for turn in asked] + answers
    return {"messages": messages, "tools": record.get("tools") or None}


def sharegpt_messages(record: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a record of ShareGPT's conversations as messages.

    Raises:
        UserError: a turn has an unknown speaker, or no text.
    """
    turns = record["conversations"]
    if not is_messages(turns):
        raise UserError(
            f"{where}: 'conversations' is {turns!r:.40}, it must be a list of objects with from "
            "and value"
        )
    messages: list[dict[str, Any]] = []
    if record.get("system"):
        messages.append({"role": "system", "content": string_of(record, "system", where)})
    for number, turn in enumerate(turns, start=1):
        here = f"{where}, turn {number}"
        if "role" in turn:  # the hub has both spellings under this field
            messages.append(turn)
            continue
        speaker = string_of(turn, "from", here)
        if speaker not in _ROLES:
            raise UserError(
                f"{here}: 'from' is {speaker!r:.40}, it must be one of {', '.join(_ROLES)}"
            )
        content = string_of(turn, "value", here)
        message = {"role": _ROLES[speaker], "content": content, "weight": turn.get("weight")}
        if speaker == _CALL:
            message |= {"content": "", "tool_calls": _calls(content, here)}
        messages.append(message)
    return {"messages": messages, "tools": record.get("tools") or None}


_AS_MESSAGES: Final[Mapping[Form, Callable[[dict[str, Any], str], dict[str, Any]]]] = {
    "alpaca": alpaca_messages,
    "turns": turns_messages,
    "sharegpt": sharegpt_messages,
}


def _calls(text: str, where: str) -> list[dict[str, Any]]:
    """Return the calls of tools in a text of JSON as those of a message.

    Raises:
        UserError: it holds something else.
    """
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    calls = found if isinstance(found, list) else [found]
    if not calls or not all(isinstance(c, dict) and {"name", "arguments"} <= {*c} for c in calls):
        raise UserError(
            f"{where}: the value of its {_CALL} is {text!r:.40}, it must be a JSON object with "
            "name and arguments, or a list of such"
        )
    return [
        {
            "type": "function",
            # as OpenAI writes them: a text, which templates that take objects get decoded
            "function": {**call, "arguments": _json_text(call["arguments"])},
        }
        for call in calls
    ]


def _json_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
