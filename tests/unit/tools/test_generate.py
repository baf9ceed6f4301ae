"""`shardscale generate`: text from a run, in whole characters, up to a stop string; refusals."""

import contextlib
import io
import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_tokenizers import CHATML, chat_tokenizer
from tokenizers import Tokenizer

from launcher.checkpoint import Checkpointer
from launcher.checkpoint.pretrained.loading import Vocabulary, build, open_source, vocabulary
from launcher.data.chat import ChatTemplate
from launcher.data.tokenizer import ByteEncoder, Encoder, load_encoder, train_bpe
from launcher.model.config import ModelConfig
from launcher.model.gpt import GPT
from launcher.strategies.engine import train_step
from launcher.strategies.native import NativeEngine
from launcher.tools.exchange import export_cli, import_cli
from launcher.tools.generate import generate_cli as cli
from launcher.tools.generate.chat import Chat, template_of
from launcher.tools.generate.choice import GenerateOptions
from launcher.tools.generate.decoding import Characters, StopStrings, complete
from launcher.tools.generate.generate import texts, write
from launcher.util.errors import ExitCode, UserError
from launcher.util.startup import interruptible

CONTEXT = 48
SHAPE: dict[str, Any] = {
    **{"context": CONTEXT, "layers": 2, "heads": 2, "d_model": 32},
    **{"norm": "rms", "activation": "swiglu", "d_ff": 64},
    **{"bias": "none"},
    "position": "rope",  # so that it knows its text from any place on
}
TEXT = "é 中 🙂 nine lives, and a naïve cat. "
SMALL = ModelConfig(vocab_size=257, **SHAPE)


def trained(
    folder: Path,
    config: ModelConfig,
    tokenizer: str,
    encoder: Encoder,
    steps: int = 1,
    text: str = TEXT,
) -> None:
    """A run with a checkpoint after its last step; after 80 it knows its text by heart."""
    torch.manual_seed(0)
    module = GPT(config)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.1)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, fused=True)
    engine = NativeEngine(module, optimizer, accumulation=1, clip=1.0, device=torch.device("cpu"))
    end = encoder.end_of_text
    whole = torch.tensor([end, *map(int, encoder.encode([text])[0]), end])
    # From any place on, as a prompt may begin anywhere.
    starts = range(0, len(whole) - 1, 4)
    rows = torch.full((len(starts), len(whole)), -100)
    for row, start in zip(rows, starts, strict=True):
        row[: len(whole) - start] = whole[start:]
    batch = [(rows[:, :-1].clamp(min=0), rows[:, 1:].contiguous())]
    for _ in range(steps):
        train_step(engine, batch, 1e-2)
    extra: Any = {"config": {"tokenizer": tokenizer}, "model": config}
    Checkpointer(folder / "checkpoints").save(steps, engine, extra)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Knows bytes; not to be changed."""
    folder = tmp_path_factory.mktemp("run")
    trained(folder, SMALL, "byte", ByteEncoder(), steps=80)
    return folder


@pytest.fixture(scope="module")
def bpe_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a tokenizer of its own, whose tokens are parts of characters too."""
    folder = tmp_path_factory.mktemp("bpe")
    encoder = train_bpe([TEXT], 270)
    trained(folder, ModelConfig(vocab_size=270, **SHAPE), "bpe", encoder, steps=80)
    encoder.save(folder / "tokenizer.json")
    return folder


def generate(*arguments: object) -> int:
    return cli.main(list(map(str, arguments)))


def lines(capsys: pytest.CaptureFixture[str], *arguments: object) -> list[dict[str, Any]]:
    capsys.readouterr()
    assert generate(*arguments) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize("which", ["run", "bpe_run"])
def test_a_run_goes_on_with_its_text_to_its_end(
    which: str, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = request.getfixturevalue(which)
    (said,) = lines(capsys, folder, "--prompt", "é 中")
    assert said == {
        "prompt": "é 中",
        "text": TEXT.removeprefix("é 中"),
        "tokens": said["tokens"],
        "stopped_by": "end",
    }
    assert 1 < said["tokens"] < CONTEXT
    # An empty prompt is the end of another text.
    assert lines(capsys, folder, "--prompt", "")[0]["text"] == TEXT


def test_prompts_come_from_a_file_or_from_standard_input(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "prompts.jsonl"
    prompts = ["nine", "and a"]
    file.write_text("".join(json.dumps({"prompt": prompt}) + "\n\n" for prompt in prompts))
    said = lines(capsys, run, "--prompts", file, "--max-tokens", 3)
    assert [one["prompt"] for one in said] == prompts
    assert [one["text"] for one in said] == [" li", " na"]
    assert {(one["tokens"], one["stopped_by"]) for one in said} == {(3, "length")}
    monkeypatch.setattr(sys, "stdin", io.StringIO("nine"))
    assert lines(capsys, run, "--max-tokens", 3) == said[:1]
    # A chat template ends with a newline that is part of it.
    monkeypatch.setattr(sys, "stdin", io.StringIO("nine\n"))
    assert lines(capsys, run, "--max-tokens", 3)[0]["prompt"] == "nine\n"


def test_one_checkpoint_in_low_precision(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = run / "checkpoints" / "step-00000080"
    (said,) = lines(capsys, checkpoint, "--prompt", "nine", "--dtype", "bf16", "--max-tokens", 6)
    assert said["text"] == " lives"


def test_an_export_gives_the_same_text(
    bpe_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = lines(capsys, bpe_run, "--prompt", "nine")
    for dtype in ("fp32", "bf16"):
        out = tmp_path / dtype
        assert export_cli.main([str(bpe_run), "--out", str(out), "--dtype", dtype]) == 0
        assert lines(capsys, out, "--prompt", "nine") == said
    assert import_cli.main([str(out), "--out", str(tmp_path / "run")]) == 0
    assert lines(capsys, tmp_path / "run", "--prompt", "nine") == said


def test_generation_config_can_name_more_ends(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As those of chat models do."""
    out = tmp_path / "hf"
    assert export_cli.main([str(run), "--out", str(out)]) == 0
    named = {"eos_token_id": [256, ord(",")]}
    (out / "generation_config.json").write_text(json.dumps(named))
    assert import_cli.main([str(out), "--out", str(tmp_path / "run")]) == 0
    for source in (out, tmp_path / "run"):
        (said,) = lines(capsys, source, "--prompt", "nine")
        assert (said["text"], said["tokens"], said["stopped_by"]) == (" lives", 6, "end")


def test_a_folder_of_transformers_that_is_none(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "hf"
    assert export_cli.main([str(run), "--out", str(out), "--tokenizer", "none"]) == 0
    assert "without a tokenizer: give --tokenizer" in refusal(capsys, out, "--prompt", "a")
    (out / "generation_config.json").write_text("[]")
    told = ("--prompt", "a", "--tokenizer", "byte")
    assert "must be a JSON object" in refusal(capsys, out, *told)
    (out / "generation_config.json").unlink()
    (out / "model.safetensors").unlink()
    assert "model.safetensors" in refusal(capsys, out, *told)
    (out / "config.json").write_text('{"model_type": "clip"}')
    assert "clip is no causal decoder" in refusal(capsys, out, *told)


def test_stop_strings_are_not_written(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (said,) = lines(capsys, run, "--prompt", "nine", "--stop", "cat", "--stop", "es, and")
    assert (said["text"], said["stopped_by"]) == (" liv", "stop")
    assert said["tokens"] == len(" lives, and")


def test_a_seed_draws_the_same_text_and_each_prompt_has_its_own(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "nine"}\n' * 2)
    options = ("--temperature", 30, "--max-tokens", 20)
    first = lines(capsys, run, "--prompts", file, "--seed", 4, *options)
    assert first == lines(capsys, run, "--prompts", file, "--seed", 4, *options)
    assert first[0] != first[1]
    assert lines(capsys, run, "--prompt", "nine", "--seed", 5, *options) == first[1:]


def test_a_terminal_gets_whole_characters_as_they_come(run: Path) -> None:
    leader, follower = pty.openpty()
    command = [sys.executable, "-m", "launcher", "generate", str(run), "--prompt", "é 中"]
    done = subprocess.run(
        command, stdout=follower, stdin=follower, timeout=120, env=os.environ | {"LANG": "C.UTF-8"}
    )
    os.close(follower)
    assert done.returncode == 0
    shown = os.read(leader, 10_000).decode()
    os.close(leader)
    assert shown == f"{TEXT}\r\n"


def test_an_interrupt_ends_it_without_a_traceback(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupting(io.StringIO):
        def read(self, size: int | None = -1) -> str:
            signal.raise_signal(signal.SIGINT)
            return super().read(size)

    monkeypatch.setattr(sys, "stdin", Interrupting("never read"))
    with pytest.raises(SystemExit) as end, interruptible():
        cli.main([str(run)])
    assert end.value.code == ExitCode.INTERRUPTED
    assert capsys.readouterr().out == "\n"


ANSWERS = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
CONVERSATION = [
    {"role": "user", "content": "is it a question?"},
    {"role": "assistant", "content": "the answer."},
    {"role": "user", "content": "what is the number?"},
    {"role": "assistant", "content": "a larger one."},
]


@pytest.fixture(scope="module")
def chat_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Knows a conversation by heart."""
    pytest.importorskip("transformers")
    folder = chat_tokenizer(tmp_path_factory.mktemp("chat"), CHATML + ANSWERS)
    template = ChatTemplate.of(f"hf:{folder}", "chats")
    text = template.document({"messages": CONVERSATION}, "here").text
    tokenizer = str(folder / "tokenizer.json")
    config = ModelConfig(vocab_size=300, **{**SHAPE, "context": 96})
    trained(folder, config, tokenizer, load_encoder(tokenizer), steps=80, text=text)
    return folder


def test_a_chat_answers_from_all_turns(
    chat_run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [turn["content"] for turn in CONVERSATION[::2]]
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{asked[0]}\n\n{asked[1]}\n"))
    assert cli.main([str(chat_run), "--chat"]) == 0
    assert capsys.readouterr().out == "the answer.\na larger one.\n"
    assert cli.main([str(chat_run), "--chat", "--prompt", asked[0]]) == 0
    assert capsys.readouterr().out == "the answer.\n"


def test_a_chat_on_a_terminal_streams_and_ends_by_ctrl_c(chat_run: Path) -> None:
    leader, follower = pty.openpty()
    command = [sys.executable, "-m", "launcher", "generate", str(chat_run), "--chat"]
    chat = subprocess.Popen(command, stdin=follower, stdout=follower, stderr=subprocess.DEVNULL)
    shown = b""
    for wanted, typed in ((b"> ", b"is it a question?\n"), (b"the answer.\r\n> ", b"")):
        while not shown.endswith(wanted):
            shown += os.read(leader, 1000)
        os.write(leader, typed)
    try:
        # One that comes between readline's prompt and its wait for a key is heard with the next.
        for _ in range(12):
            chat.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                chat.wait(timeout=5)
                break
        assert chat.returncode == ExitCode.INTERRUPTED
    finally:
        chat.kill()
    os.close(follower)
    os.close(leader)


def chat_of(chat_run: Path, *, max_tokens: int | None) -> Chat:
    with open_source(chat_run) as source:
        known = vocabulary(source, None)
        model = build(source, device=torch.device("cpu"), dtype=torch.float32)
        template = template_of(source, None)
    return Chat(
        model=model,
        known=known,
        template=template,
        options=GenerateOptions(source=chat_run, max_tokens=max_tokens, chat=True, system="is it?"),
        context=SHAPE["context"] * 2,
    )


def test_a_chat_drops_its_first_turns_and_keeps_the_system_message(chat_run: Path) -> None:
    chat = chat_of(chat_run, max_tokens=4)
    for number in range(4):
        chat.answer(f"question {number}?", lambda _: None)
    text = chat.known.encoder.decode(chat._tokens(), special=True)
    assert text.startswith("<|im_start|>system\nis it?<|im_end|><|im_start|>user\nquestion ")
    assert "question 0?" not in text
    assert "question 3?" in text
    with pytest.raises(UserError, match=r"this turn has .* tokens, and the model's context is 96"):
        chat.answer("question " * 100, lambda _: None)
    assert chat.history[-2]["content"] == "question 3?"  # what was said before stays known
    assert chat.answer("a?", lambda _: None).tokens <= 4  # goes on afterwards


def test_a_chat_drops_turns_before_answers_grow_short(chat_run: Path) -> None:
    chat = chat_of(chat_run, max_tokens=None)
    chat.context = 200
    for _ in range(5):
        chat.history.append({"role": "user", "content": "is it?"})
        assert len(chat._tokens()) <= chat.context // 2
        chat.history.append({"role": "assistant", "content": "the answer."})
    assert len(chat.history) > 2
    # one turn alone may take more: there is nothing to drop
    chat.history = [{"role": "user", "content": "question? " * 50}]
    assert chat.context // 2 < len(chat._tokens()) < chat.context


def test_a_terminal_gets_nothing_that_it_would_obey(capsys: pytest.CaptureFixture[str]) -> None:
    write("\x1b[31mé\r\t中\n")
    assert capsys.readouterr().out == "�[31mé�\t中\n"


def pieces(encoder: Encoder, tokens: Sequence[int]) -> list[str]:
    characters = Characters(encoder.decode)
    return [*(characters.add(token) for token in tokens), characters.rest()]


def test_a_character_of_several_tokens_comes_in_one_piece() -> None:
    found = pieces(ByteEncoder(), list("a🙂é".encode()))
    assert found == ["a", "", "", "", "🙂", "", "é", ""]


def test_broken_bytes_come_in_the_end() -> None:
    broken = "\N{REPLACEMENT CHARACTER}"
    assert pieces(ByteEncoder(), [*b"a", 0xF0, 0x9F]) == ["a", "", "", broken]
    assert pieces(ByteEncoder(), [0xF0, 0x9F, *b"b"]) == ["", "", f"{broken}b", ""]


def test_a_space_between_two_words_is_not_lost() -> None:
    """It stays where a tokenizer writes it to the second word, and drops it from a text's first."""
    from tokenizers import Tokenizer, decoders, models

    words = Tokenizer(models.WordLevel({"▁one": 0, "▁two": 1, "▁three": 2}, unk_token="▁one"))
    words.decoder = decoders.Metaspace()
    characters = Characters(lambda ids: str(words.decode(list(ids))), [0])
    assert [characters.add(1), characters.add(2), characters.rest()] == [" two", " three", ""]


@pytest.mark.parametrize(
    ("stops", "given", "written", "found"),
    [
        (["stop"], ["a st", "op b"], ["a ", ""], True),
        (["stop"], ["a sto", "ne"], ["a ", "stone"], False),
        (["aab"], ["aa", "ab"], ["", "a"], True),
        (["b", "abc"], ["a", "bc"], ["", ""], True),
        (["xy"], ["x"], [""], False),
        ([], ["x", "y"], ["x", "y"], False),
    ],
)
def test_stop_strings_straddle_pieces(
    stops: list[str], given: list[str], written: list[str], found: bool
) -> None:
    through = StopStrings(stops)
    assert [through.add(piece) for piece in given] == written
    assert through.found is found
    if not found:
        assert "".join([*written, through.rest()]) == "".join(given)


def test_a_character_that_stays_broken_is_shown_at_the_end() -> None:
    model = GPT(SMALL).eval()
    known = Vocabulary(encoder=ByteEncoder(), ends={256}, rows=257)
    tokens = iter([*b"ok", 0xF0])
    shown: list[str] = []
    said = complete(
        model, known, [65], most=3, choose=lambda _: next(tokens), stops=(), show=shown.append
    )
    assert said.text == "".join(shown) == "ok\N{REPLACEMENT CHARACTER}"
    assert (said.tokens, said.stopped_by) == (3, "length")


def refusal(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    capsys.readouterr()
    assert generate(*arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("shardscale: ")
    assert printed.err.count("\n") == 1
    return printed.err


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--temperature -1", "--temperature -1.0 must be 0 or more"),
        ("--temperature 1 --top-p 0", "--top-p 0.0 must be more than 0"),
        ("--temperature 1 --top-p 1.1", "at most 1"),
        ("--top-k 5", "--top-k 5 needs a --temperature above 0"),
        (
            "--max_new_tokens 5",
            ": Unrecognized options: --max-new-tokens, 5: did you mean --max-tokens?",
        ),
        ("--foo 5", "Unrecognized options: --foo, 5; shardscale generate --help lists them"),
        ("--max-tokens 0", "--max-tokens 0 must be 1 or more"),
        ("--max-tokens 47", "6 tokens and --max-tokens 47 exceed the model's context of 48"),
        ("--seed -1", "--seed -1 must be 0 or more"),
        ("--stop=", "--stop '' ends every text"),
        ("--prompts p.jsonl", "exclude each other"),
        ("--tokenizer nowhere.json", "there is no tokenizer 'nowhere.json'"),
        ("--tokenizer bpe", "give the tokenizer.json"),
        ("--dtype int8", "int8"),
        ("--wat", "--wat"),
        ("--chat", "has no chat template"),
        ("--chat --prompts p.jsonl", "exclude each other"),
        ("--system Brief.", "--system 'Brief.' belongs to --chat"),
    ],
)
def test_a_bad_option_is_one_sentence(
    options: str, says: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert says in refusal(capsys, run, "--prompt", "prompt", *options.split())


def test_a_prompt_longer_than_the_context(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refusal(capsys, run, "--prompt", "x" * 48)
    assert "the prompt has 48 tokens, and the model's context is 48" in said


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b'{"prompt": "a"}\n{"text": "b"}\n', "line 2 has no field 'prompt' (fields: text): write"),
        (b'{"prompt": 3}\n', "line 1"),
        (b"{nonsense\n", "line 1 is not JSON"),
        (b'{"prompt": "\xff"}\n', "line 1 is not UTF-8"),
        (b"\n", "holds no prompt"),
        (None, "cannot be read (No such file"),
    ],
)
def test_bad_prompts(
    content: bytes | None, says: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "p.jsonl"
    if content is not None:
        file.write_bytes(content)
    assert says in refusal(capsys, run, "--prompts", file)


def test_bad_standard_input(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe"), "utf-8"))
    assert "standard input is not UTF-8" in refusal(capsys, run)


def test_nothing_to_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refusal(capsys, tmp_path / "no", "--prompt", "a")
    assert "does not exist" in said
    assert said.endswith("or hf:ORG/NAME\n")
    assert "holds no checkpoint" in refusal(capsys, tmp_path, "--prompt", "a")


def test_a_damaged_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained(tmp_path, SMALL, "byte", ByteEncoder())
    file = next((tmp_path / "checkpoints").glob("step-*/*.safetensors"))
    whole = bytearray(file.read_bytes())
    whole[2000] ^= 1
    file.write_bytes(whole)
    assert "is damaged" in refusal(capsys, tmp_path, "--prompt", "a")
    file.write_bytes(whole[:-4])
    assert "is damaged" in refusal(capsys, tmp_path, "--prompt", "a")


def test_a_tokenizer_that_does_not_fit(
    run: Path, bpe_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = bpe_run / "tokenizer.json"
    said = refusal(capsys, run, "--prompt", "a", "--tokenizer", other)
    assert "is beyond the vocabulary of 257" in said
    larger = Tokenizer.from_file(str(other))
    larger.add_special_tokens(["<image>"])
    larger.save(str(tmp_path / "larger.json"))
    flags = (bpe_run, "--tokenizer", tmp_path / "larger.json", "--prompt")
    assert refusal(capsys, *flags, "an <image>").startswith(
        "shardscale: the prompt has '<image>', whose id"
    )
    endless = tmp_path / "endless.json"
    endless.write_text(other.read_text().replace("<|endoftext|>", "<|middle|>"))
    said = refusal(capsys, bpe_run, "--prompt", "", "--tokenizer", endless)
    assert "has no token that ends a text" in said


def test_a_lost_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained(tmp_path, SMALL, "bpe", ByteEncoder())
    assert "give --tokenizer FILE" in refusal(capsys, tmp_path, "--prompt", "a")


def test_weights_that_are_no_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = GPT(SMALL)
    engine = NativeEngine(
        module,
        torch.optim.SGD(module.parameters()),
        accumulation=1,
        clip=0.0,
        device=torch.device("cpu"),
    )
    Checkpointer(tmp_path / "checkpoints").save(1, engine, {})
    assert "does not say which model" in refusal(capsys, tmp_path, "--prompt", "a")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refusal(capsys, run, "--prompt", "a", "--device", "cuda")
    assert "this machine has no GPU" in said


def test_text_that_is_no_text(run: Path) -> None:
    with pytest.raises(UserError, match="not UTF-8"):
        list(texts(GenerateOptions(source=run, prompt="a\udcff")))
