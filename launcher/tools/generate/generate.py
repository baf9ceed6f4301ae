"""Continue prompts with a trained model, one after the other or in a chat."""

import json
import sys
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import asdict

import torch

from launcher.checkpoint.pretrained.loading import (
    Source,
    Vocabulary,
    build_any,
    chosen_device,
    open_source,
    vocabulary,
)
from launcher.data.formats import read_jsonl
from launcher.model.config import ModelConfig
from launcher.optim.dtypes import torch_dtype
from launcher.run.sampling import token_sampler
from launcher.tools.generate.choice import GenerateOptions
from launcher.tools.generate.decoding import Completion, complete
from launcher.util.errors import WHY, UserError, refused

DEFAULT_MAX_TOKENS = 256


def generate(options: GenerateOptions) -> None:
    """Continue each prompt in turn.

    Raises:
        UserError: no model, tokenizer or prompt, or a prompt that exceeds the context.
    """
    sampling, device = options.sampling, chosen_device(options.device)
    with open_source(options.source) as source:
        known = vocabulary(source, options.tokenizer)
        if options.chat:
            converse(options, source, known, device)
            return
        prompts = [
            (text, *tokenized(text, known, source.config, options.max_tokens))
            for text in texts(options)
        ]
        model = build_any(source, device=device, dtype=torch_dtype(options.dtype))
    live = sys.stdout.isatty()
    for number, (text, tokens, most) in enumerate(prompts):
        completion = complete(
            model,
            known,
            tokens,
            most=most,
            choose=token_sampler(sampling, options.seed + number),
            stops=options.stop,
            show=start_stream(text, number) if live else lambda _: None,
        )
        print("" if live else as_json(text, completion), flush=True)


def converse(
    options: GenerateOptions, source: Source, known: Vocabulary, device: torch.device
) -> None:
    """Answer turn by turn.

    Raises:
        UserError: no chat template, or a turn that cannot be answered.
    """
    from launcher.tools.generate.chat import Chat, run_chat, template_of

    template = template_of(source, options.tokenizer)
    model = build_any(source, device=device, dtype=torch_dtype(options.dtype))
    chat = Chat(
        model=model,
        known=known,
        template=template,
        options=options,
        context=source.config.context,
    )
    run_chat(chat, options.prompt, write)


def texts(options: GenerateOptions) -> Iterator[str]:
    """Yield the prompts.

    Raises:
        UserError: no prompt, or one that cannot be read.
    """
    if options.prompts is not None:
        said = f"--prompts {options.prompts}: cannot be read ({WHY}); give a .jsonl file"
        with refused(OSError, said):
            found = list(read_jsonl(options.prompts, "prompt", 'write {"prompt": "..."}'))
        if not found:
            raise UserError(f"--prompts {options.prompts}: holds no prompt; give one per line")
        yield from found
    elif options.prompt is not None:
        yield valid(options.prompt, "--prompt")
    elif sys.stdin is None or sys.stdin.isatty():
        raise UserError("there is no prompt: give --prompt TEXT or --prompts FILE")
    else:
        try:
            text = sys.stdin.read()
        except UnicodeDecodeError as error:
            raise UserError(f"standard input is not UTF-8 text ({error}): convert it") from None
        yield valid(text, "standard input")


def valid(text: str, place: str) -> str:
    """Return `text` if it is valid: Python decodes bytes that are not UTF-8 to lone surrogates.

    Raises:
        UserError: the text holds such bytes.
    """
    if any(unicodedata.category(character) == "Cs" for character in text):
        raise UserError(f"{place} {text!r} is not UTF-8 text: convert it")
    return text


def tokenized(
    text: str, known: Vocabulary, config: ModelConfig, max_tokens: int | None
) -> tuple[list[int], int]:
    """Return a prompt's tokens, and the limit on new ones; an empty one becomes the end-of-text
    token.

    Raises:
        UserError: it cannot be encoded, exceeds the context, or has a token without a row.
    """
    tokens = known.encoder.encode_prompt(text) or [known.encoder.end_of_text]
    known.check(tokens)
    room = config.context - len(tokens)
    most = min(DEFAULT_MAX_TOKENS, room) if max_tokens is None else max_tokens
    if room < 1:
        raise UserError(
            f"the prompt has {len(tokens)} tokens, and the model's context is {config.context}: "
            f"shorten it to {config.context - 1} or fewer"
        )
    if most > room:
        raise UserError(
            f"the prompt's {len(tokens)} tokens and --max-tokens {most} exceed the model's context "
            f"of {config.context}: give --max-tokens {room} or less"
        )
    return tokens, most


def start_stream(prompt: str, number: int) -> Callable[[str], None]:
    """Write the prompt to the terminal; returns the function that writes its continuation."""
    if number:
        print()
    write(prompt)
    return write


def write(text: str) -> None:
    """Write to a terminal at once, without control characters."""
    shown = (c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)
    print("".join(shown), end="", flush=True)


def as_json(prompt: str, completion: Completion) -> str:
    """Format one JSON line."""
    return json.dumps({"prompt": prompt, **asdict(completion)})
