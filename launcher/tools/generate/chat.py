"""`shardscale generate --chat`: answer turn by turn, with the history and the chat template."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from launcher.checkpoint.pretrained.loading import Source, Vocabulary
from launcher.data.chat import ChatTemplate
from launcher.model.foreign.decoder import ForeignDecoder
from launcher.model.gpt import GPT
from launcher.run.sampling import token_sampler
from launcher.tools.generate.choice import GenerateOptions
from launcher.tools.generate.decoding import Completion, complete
from launcher.util.errors import UserError, tell

Message = dict[str, str]
DEFAULT_ANSWER = 512
"""Tokens of an answer at most, where the context has room."""
_PROMPT = "> "


def template_of(source: Source, given: str | None) -> ChatTemplate:
    """Return the chat template of the weights' tokenizer.

    Raises:
        UserError: there is none.
    """
    tokenizer = given or source.tokenizer()
    found = None if tokenizer is None else ChatTemplate.find(tokenizer)
    if found is None:
        raise UserError(
            f"--chat: the tokenizer of {source.beside} has no chat template: give --tokenizer of "
            "a chat model, or leave --chat out and write the whole prompt"
        )
    return found


@dataclass(kw_only=True)
class Chat:
    """A conversation with a model.

    Old turns are dropped, the first ones first, where the context is too short for all.
    """

    model: GPT | ForeignDecoder
    known: Vocabulary
    template: ChatTemplate
    options: GenerateOptions
    context: int
    history: list[Message] = field(default_factory=list)

    def __post_init__(self) -> None:
        ends = {*self.known.ends, *self.template.turn_ends()}
        self.known = replace(self.known, ends=ends)
        self._choose = token_sampler(self.options.sampling, self.options.seed)

    def answer(self, text: str, show: Callable[[str], None]) -> Completion:
        """Return the answer to a user's turn, passing its text to `show` as it comes.

        Raises:
            UserError: the turn alone is longer than the context, or the template rejects it.
        """
        before = list(self.history)
        self.history.append({"role": "user", "content": text})
        try:
            tokens = self._tokens()
        except UserError:
            self.history = before
            raise
        room = self.context - len(tokens)
        done = complete(
            self.model,
            self.known,
            tokens,
            most=min(self.options.max_tokens or DEFAULT_ANSWER, room),
            choose=self._choose,
            stops=self.options.stop,
            show=show,
        )
        self.history.append({"role": "assistant", "content": done.text})
        return done

    def _tokens(self) -> list[int]:
        """Return the prompt of the history, without its first turns where they do not fit."""
        system = self.options.system
        first = [] if system is None else [{"role": "system", "content": system}]
        while True:
            text = self.template.prompt([*first, *self.history])
            # The template writes all special tokens itself.
            tokens = [int(token) for token in self.known.encoder.encode([text])[0]]
            self.known.check(tokens)
            # Old turns make room for the answer, in at most half of the context. Without
            # --max-tokens the last turn is answered in what room it leaves.
            most = self.options.max_tokens or (DEFAULT_ANSWER if len(self.history) > 2 else 1)
            needed = len(tokens) + min(most, self.context // 2)
            if needed <= self.context:
                return tokens
            # a user turn and its answer go together; the last turn alone cannot
            if len(self.history) < 3:
                raise UserError(
                    f"this turn has {len(tokens)} tokens, and the model's context is "
                    f"{self.context}: shorten it"
                )
            del self.history[:2]


def run_chat(chat: Chat, prompt: str | None, write: Callable[[str], None]) -> None:
    """Answer `prompt`, or each line of standard input until its end.

    Raises:
        UserError: the only turn cannot be answered.
    """
    if prompt is not None:
        chat.answer(prompt, write)
        write("\n")
        return
    for line in _lines():
        try:
            chat.answer(line, write)
            write("\n")
        except UserError as error:
            tell(error)


def _lines() -> Iterator[str]:
    live = sys.stdin.isatty() and sys.stdout.isatty()
    if live:
        print("Write a line; Ctrl-D or Ctrl-C ends the chat.", file=sys.stderr)
        import readline  # noqa: F401  # line editing and history of input()
    while True:
        try:
            line = input(_PROMPT if live else "")
        except EOFError:
            if live:
                print()
            return
        if line.strip():
            yield line
