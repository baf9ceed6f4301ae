"""Lines with prompts or messages: which tokens they become, and which of those are learned."""

import json
import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_tokenizers import CHATML, chat_tokenizer
from corpora import open_text
from harness import train
from tokenizers import Tokenizer, processors

from launcher.checkpoint.pretrained.companions import carry_beside
from launcher.data import IGNORED_TARGET, Corpus, EvaluationBatches, GlobalBatches
from launcher.data.chat import ChatTemplate
from launcher.data.corpus_build import encode
from launcher.data.formats import with_prompt
from launcher.data.tokenizer import load_encoder
from launcher.util.errors import UserError
from launcher.util.packages import how_to_install

# Trims, has a space before the end of a turn, and refuses what it does not know.
LLAMA2 = (
    "{% for m in messages %}{% if m.role == 'user' %}<s>[INST] {{ m.content | trim }} [/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content | trim }} </s>"
    "{% else %}{{ raise_exception('only user and assistant roles are supported') }}{% endif %}"
    "{% endfor %}"
)
# As Qwen3's: reasoning is kept in the last answer only, which has an empty one where it has none.
THINKS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% set text = m.content.split('</think>')[-1].strip() %}"
    "{% if m.role == 'assistant' and loop.last %}<think>\n"
    "{{ m.content.split('</think>')[0].split('<think>')[-1].strip()"
    " if '</think>' in m.content else '' }}\n</think>\n\n{% endif %}"
    "{{ text }}<|im_end|>\n{% endfor %}"
)
ASKS = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
CALLS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}</call>{% endfor %}"
    "<|im_end|>\n{% endfor %}"
)
QUIET = (
    "{% for m in messages %}{% if m.role != 'critic' %}{{ m.content }}</s>{% endif %}{% endfor %}"
)


def turns(*contents: str, first: str = "user") -> list[dict[str, str]]:
    roles = ["user", "assistant"] if first == "user" else ["assistant", "user"]
    return [{"role": roles[n % 2], "content": text} for n, text in enumerate(contents)]


def write(path: Path, records: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def opened(data: Path, tokenizer: str = "byte", **options: Any) -> Corpus:
    settings = {"vocab_size": 400, "cache_dir": data.parent / "cache", **options}
    return open_text(data, tokenizer=tokenizer, **settings)


def learned_text(folder: Path, messages: Sequence[Mapping[str, Any]]) -> tuple[str, list[str]]:
    """The text that messages become, and what of it is learned, piece by piece."""
    template = ChatTemplate.of(f"hf:{folder}", "chats.jsonl")
    document = template.document({"messages": messages}, "line 1")
    encoder = load_encoder(f"hf:{folder}")
    ((ids, learned),) = encode(encoder, [document])
    assert learned is not None
    decode = template.tokenizer.decode
    assert (
        decode(ids)
        == document.text
        == template.tokenizer.apply_chat_template(messages, tokenize=False)
    )
    edges = np.flatnonzero(np.diff(learned, prepend=0, append=0))
    return document.text, [decode(ids[a:b]) for a, b in edges.reshape(-1, 2)]


def pairs(count: int) -> list[dict[str, str]]:
    return [{"prompt": f"{n} + {n} =", "completion": f" {2 * n}"} for n in range(count)]


def test_prompts_are_masked_and_completions_with_their_end_are_learned(tmp_path: Path) -> None:
    train = opened(write(tmp_path / "sums.jsonl", pairs(40)), document_attention=True).train
    assert train.learned is not None
    assert train.documents is not None
    ends = [*train.documents[1:], len(train.tokens)]
    found = set()
    for begin, end in zip(train.documents, ends, strict=True):
        ids, learned = train.tokens[begin:end], train.learned[begin:end]
        assert ids[-1] == 256
        text = bytes(ids[:-1].tolist()).decode()
        prompt, equals, completion = text.partition("=")
        found.add((prompt + equals, completion))
        assert learned.tolist() == [0] * len(prompt + equals) + [1] * (len(completion) + 1)
    assert found < {(pair["prompt"], pair["completion"]) for pair in pairs(40)}
    assert len(found) > 20


def test_a_token_that_begins_in_the_prompt_is_learned_where_the_prompt_alone_has_another(
    tmp_path: Path,
) -> None:
    folder = chat_tokenizer(tmp_path / "tokenizer", None)
    record = {"prompt": "What is the lar", "completion": "gest number"}
    encoder = load_encoder(f"hf:{folder}")
    ((ids, learned),) = encode(encoder, [with_prompt(record, "line 1")])
    alone, whole = encoder.encode(["What is the lar", "What is the largest number"])
    assert ids[:-1].tolist() == list(whole)
    assert learned is not None
    first = int(np.argmax(learned))
    assert list(alone[:first]) == list(whole[:first])
    assert alone[first] != whole[first]
    assert learned.tolist() == [False] * first + [True] * (len(ids) - first)


def test_masks_of_a_chat_are_those_transformers_takes_from_the_template(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = chat_tokenizer(tmp_path / "tokenizer", CHATML)
    chats = [
        [{"role": "system", "content": f"Be brief, {n}."}, *turns("Hi!", "A b", "And?", " c\n\n")]
        for n in range(30)
    ]
    corpus = opened(
        write(tmp_path / "chats.jsonl", [{"messages": chat} for chat in chats]), f"hf:{folder}"
    )
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    expected = {}
    for chat in chats:
        found = tokenizer.apply_chat_template(
            chat, return_dict=True, return_assistant_tokens_mask=True
        )
        expected[tuple(found["input_ids"])] = found["assistant_masks"]
    train = corpus.train
    assert train.learned is not None
    begin = 0
    while begin < len(train.tokens):
        end = next(
            n for n in range(begin + 1, begin + 200) if tuple(train.tokens[begin:n]) in expected
        )
        assert train.learned[begin:end].tolist() == expected[tuple(train.tokens[begin:end])]
        begin = end


def test_an_answer_is_learned_up_to_the_end_of_its_turn(tmp_path: Path) -> None:
    chatml = chat_tokenizer(tmp_path / "chatml", CHATML)
    assert learned_text(chatml, turns("user says", "user", "it", "is"))[1] == [
        "user<|im_end|>",
        "is<|im_end|>",
    ]
    llama2 = chat_tokenizer(tmp_path / "llama2", LLAMA2)
    text, learned = learned_text(llama2, turns(" What? ", " It is. ", "Why?", "No.\n"))
    assert text == "<s>[INST] What? [/INST] It is. </s><s>[INST] Why? [/INST] No. </s>"
    assert [piece.strip() for piece in learned] == ["It is. </s>", "No. </s>"]


def test_reasoning_that_a_template_keeps_is_learned(tmp_path: Path) -> None:
    folder = chat_tokenizer(tmp_path / "thinks", THINKS)
    thought = "<think>\nwell, so\n</think>\n\nyes"
    text, learned = learned_text(folder, turns("a?", thought, "b?", thought))
    assert "user\nb?<|im_end|>\n<|im_start|>assistant\n<think>\nwell, so\n</think>\n\nyes" in text
    assert learned == ["yes<|im_end|>", "well, so\n</think>\n\nyes<|im_end|>"]
    assert learned_text(folder, turns("a?", "no"))[1] == ["no<|im_end|>"]


def test_what_a_template_puts_before_an_answer_is_learned_where_it_asks_for_one(
    tmp_path: Path,
) -> None:
    folder = chat_tokenizer(tmp_path / "thinks", THINKS + ASKS)
    learned = learned_text(folder, turns("a?", "<think>\nwell\n</think>\n\nyes", "b?", "no"))[1]
    assert learned == ["yes<|im_end|>", "<think>\n\n</think>\n\nno<|im_end|>"]


@pytest.mark.parametrize("content", ["Let me look.", "", None])
@pytest.mark.parametrize("asks", ["", ASKS])
def test_calls_of_tools_are_learned(tmp_path: Path, content: str | None, asks: str) -> None:
    folder = chat_tokenizer(tmp_path / "calls", CALLS + asks)
    calls = [{"type": "function", "function": {"name": "weather", "arguments": {}}}]
    chat: list[dict[str, Any]] = [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": content, "tool_calls": calls},
        {"role": "tool", "content": "21"},
        {"role": "assistant", "content": "It is 21."},
    ]
    if not content and not asks:  # nothing says where the turn begins
        with pytest.raises(UserError, match="leaves out or changes message 2"):
            learned_text(folder, chat)
        return
    called = f"{content or ''}<call>weather</call><|im_end|>"
    assert learned_text(folder, chat)[1] == [called, "It is 21.<|im_end|>"]
    # Calls may have an end of their own, as Llama's: the tool's words are not learned.
    end = "{{ '</s>' if m.tool_calls else '<|im_end|>' }}\n{% endfor %}"
    ended = CALLS.replace("<|im_end|>\n{% endfor %}", end)
    other = learned_text(chat_tokenizer(tmp_path / "ended", ended + asks), chat)[1]
    assert other == [called.replace("<|im_end|>", "</s>"), "It is 21.<|im_end|>"]
    chat[1]["weight"] = 0
    assert learned_text(folder, chat)[1] == ["It is 21.<|im_end|>"]


@pytest.mark.parametrize(
    ("written", "takes"),
    [
        ("c.function.arguments | tojson", (dict, json.dumps)),  # Qwen 2.5's
        ("c.function.arguments | items | list | tojson", (dict, json.dumps)),  # Qwen3-Coder's
        ("'' + c.function.arguments", (json.dumps,)),  # DeepSeek's
    ],
)
def test_arguments_and_tools_may_be_texts_of_json(
    written: str, takes: tuple[Callable[[Any], Any], ...], tmp_path: Path
) -> None:
    """As OpenAI writes arguments, which most templates would quote a second time."""
    said = "{{ c.function.name }}{{ " + written + " }}"
    template = "{{ tools | tojson }}" + CALLS.replace("{{ c.function.name }}", said) + ASKS
    chat = ChatTemplate.of(f"hf:{chat_tokenizer(tmp_path / 'chat', template)}", "chats.jsonl")
    tool = {"type": "function", "function": {"name": "weather", "parameters": {}}}
    texts = set()
    for spelled in takes:
        call = {"function": {"name": "weather", "arguments": spelled({"city": "Bern"})}}
        answer = {"role": "assistant", "content": None, "tool_calls": [call]}
        messages = [{"role": "user", "content": "weather?"}, answer]
        tools = [tool] if spelled is dict else json.dumps([tool])
        texts.add(chat.document({"messages": messages, "tools": tools}, "line 1").text)
    (text,) = texts
    listed = "items" in written
    arguments = '[["city", "Bern"]]' if listed else '{"city": "Bern"}'
    assert f"<call>weather{arguments}</call>" in text


@pytest.mark.parametrize("written", ["c.function.arguments | tojson", "c.function.arguments + ''"])
def test_calls_in_conversations_are_learned(written: str, tmp_path: Path) -> None:
    """As LLaMA-Factory's ShareGPT has them, for templates that take objects and that take texts."""
    pytest.importorskip("transformers")
    said = "{{ c.function.name }}{{ " + written + " }}"
    template = CALLS.replace("{{ c.function.name }}", said) + ASKS
    call = {"name": "weather", "arguments": {"city": "Bern"}}
    turns = [
        {"from": "human", "value": "Weather?"},
        {"from": "function_call", "value": json.dumps(call)},
        {"from": "observation", "value": "sunny"},
        {"from": "function_call", "value": json.dumps([call, call])},
        {"from": "observation", "value": "rain"},
        {"from": "gpt", "value": "Rain."},
    ]
    path = write(tmp_path / "d.jsonl", [{"conversations": turns, "tools": "[]"}] * 30)
    tokenizer = f"hf:{chat_tokenizer(tmp_path / 'chat', template)}"
    _, learned = first_example(opened(path, tokenizer), tokenizer)
    called = '<call>weather{"city": "Bern"}</call>'
    assert learned == f"{called}<|im_end|>{called}{called}<|im_end|>Rain.<|im_end|>"


def test_half_a_character_in_a_call_is_no_traceback(tmp_path: Path) -> None:
    """JSON can spell it, in a call that was cut off."""
    folder = chat_tokenizer(tmp_path / "chat", CALLS + ASKS)
    call = {"type": "function", "function": {"name": "find \ud83d", "arguments": {}}}
    answer = {"role": "assistant", "content": None, "tool_calls": [call]}
    chat = {"messages": [{"role": "user", "content": "look"}, answer]}
    document = ChatTemplate.of(f"hf:{folder}", "chats.jsonl").document(chat, "line 1")
    assert "<call>find \ufffd</call>" in document.text
    assert document.text.encode()


def test_without_the_mask_every_token_is_a_target_and_the_tokens_are_the_same(
    tmp_path: Path,
) -> None:
    path = write(tmp_path / "sums.jsonl", pairs(40))
    masked, whole = opened(path), opened(path, mask_prompt=False)
    assert masked.fingerprint == whole.fingerprint
    assert np.array_equal(masked.train.tokens, whole.train.tokens)
    assert whole.train.learned is None
    assert "of them learned" in masked.description
    assert "of them learned" not in whole.description
    built = list((tmp_path / "cache" / "corpora").glob("*/meta.json"))
    assert len(built) == 1  # for both


def test_messages_that_an_older_version_has_written_otherwise_are_built_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    tokenizer = f"hf:{chat_tokenizer(tmp_path / 'chat', CHATML)}"
    chats = write(tmp_path / "chats.jsonl", [{"messages": turns("What?", "That.")}] * 30)
    sums = write(tmp_path / "sums.jsonl", pairs(40))
    for version, corpora in (("1", 2), ("2", 3)):
        monkeypatch.setattr("launcher.data.corpus._CHAT_FORMAT", version)
        opened(chats, tokenizer)
        opened(sums)
        assert len(list((tmp_path / "cache" / "corpora").glob("*/meta.json"))) == corpora


def test_the_fingerprint_tells_masks_apart(tmp_path: Path) -> None:
    moved = [
        {"prompt": p["prompt"] + p["completion"][0], "completion": p["completion"][1:]}
        for p in pairs(40)
    ]
    first = opened(write(tmp_path / "a.jsonl", pairs(40)))
    second = opened(write(tmp_path / "b.jsonl", moved))
    assert np.array_equal(first.train.tokens, second.train.tokens)
    assert first.fingerprint != second.fingerprint


def test_a_text_keeps_its_fingerprint_and_its_tokens(tmp_path: Path) -> None:
    """A checkpoint of an earlier version names this fingerprint."""
    path = write(tmp_path / "texts.jsonl", [{"text": f"number {n}"} for n in range(120)])
    corpus = opened(path, document_attention=True)
    assert corpus.fingerprint == FINGERPRINT
    train = corpus.train
    assert train.learned is None
    assert train.documents is not None
    ends = np.flatnonzero(train.tokens == 256)
    assert train.documents.tolist() == [0, *(ends[:-1] + 1)]


FINGERPRINT = "a89f3ced5f4c42633f968b7cbc755a819266f0f5d0209575e5866c34e9086df9"


def uneven(path: Path) -> Path:
    """Windows of 16 with one token to learn, with none, and with nothing else."""
    records = [
        {"prompt": "p" * (70 if n % 3 else 3), "completion": "c" * (3 if n % 3 else 40)}
        for n in range(60)
    ]
    return write(path, records)


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_targets_and_starts_are_those_of_each_document(
    tmp_path: Path, documents: bool, masked: bool
) -> None:
    corpus = opened(
        uneven(tmp_path / "data.jsonl"), mask_prompt=masked, document_attention=documents
    )
    split, tokens = corpus.train, corpus.train.tokens
    begins = [0, *(np.flatnonzero(tokens == 256)[:-1] + 1).tolist()]
    counts = split.target_counts(16)
    windows = np.arange(split.window_count(16))
    found = split.sequences(windows, 16)
    assert found.tokens.shape == (len(windows), 17)
    for window in windows.tolist():
        for t in range(16):
            place = 16 * window + t
            begin = max(b for b in begins if b <= place)
            target = int(tokens[place + 1])
            if documents:
                assert found.starts is not None
                assert found.starts[window, t] == max(0, begin - 16 * window)
            ignored = (documents and place + 1 in begins) or (masked and target == ord("p"))
            assert found.all_targets()[window, t] == (IGNORED_TARGET if ignored else target)
    learned = (found.all_targets() != IGNORED_TARGET).sum(axis=1)
    if documents or masked:
        assert counts is not None
        assert counts[: len(windows)].tolist() == learned.tolist()
        assert split.sequence_count(16) == (learned > 0).sum()
    else:
        assert counts is None
    assert (learned == 0).any() == masked


@pytest.mark.parametrize("documents", [False, True])
def test_weighted_means_are_the_mean_over_the_global_batch(tmp_path: Path, documents: bool) -> None:
    split = opened(uneven(tmp_path / "data.jsonl"), document_attention=documents).train
    batches = GlobalBatches(split, seq_len=16, global_batch=12, seed=3)
    rng = np.random.default_rng(0)
    for step in range(2 * batches.steps_per_epoch):
        targets = split.sequences(batches.indices(step), 16).all_targets()
        counted = targets != IGNORED_TARGET
        assert counted.any(axis=1).all()  # a sequence without is never trained on
        losses = rng.random(targets.shape)
        for world_size, micro_batch in ((1, 12), (1, 2), (2, 3), (2, 6), (3, 1)):
            means = []
            for rank in range(world_size):
                mine = batches.rank_slice(step, rank=rank, world_size=world_size)
                weights = batches.weights(step, mine, micro_batch=micro_batch)
                of_rank = slice(rank * 12 // world_size, (rank + 1) * 12 // world_size)
                parts = 12 // world_size // micro_batch
                for weight, mask, loss in zip(
                    weights,
                    np.split(counted[of_rank], parts),
                    np.split(losses[of_rank], parts),
                    strict=True,
                ):
                    means.append(weight * loss[mask].mean())
            assert np.mean(means) == pytest.approx(losses[counted].mean(), rel=1e-12)
    whole = GlobalBatches(
        opened(tmp_path / "data.jsonl", mask_prompt=False).train,
        seq_len=16,
        global_batch=12,
        seed=3,
    )
    mine = whole.rank_slice(0, rank=0, world_size=2)
    assert whole.weights(0, mine, micro_batch=3) == ()


def test_evaluation_reads_each_target_that_counts_once(tmp_path: Path) -> None:
    split = opened(uneven(tmp_path / "data.jsonl"), document_attention=True).validation
    assert split.learned is not None
    assert split.documents is not None
    is_first = np.isin(np.arange(len(split.tokens)), split.documents)
    expected = int(((split.learned != 0) & ~is_first)[1:].sum())
    for world_size, batch in ((1, 4), (2, 3)):
        read = 0
        for rank in range(world_size):
            batches = EvaluationBatches(
                split, seq_len=16, batch=batch, rank=rank, world_size=world_size
            )
            for tokens, targets, starts in batches:
                assert tokens.shape == targets.shape == starts.shape == (batch, 16)
                assert (starts <= np.arange(16)).all()
                read += int((targets != IGNORED_TARGET).sum())
        assert read == expected
    few = EvaluationBatches(split, seq_len=16, batch=2, rank=0, world_size=1, sequences=2)
    assert all((targets != IGNORED_TARGET).any(axis=1).all() for _, targets, _ in few)


def refusal(path: Path, tokenizer: str = "byte", **options: Any) -> str:
    with pytest.raises(UserError) as caught:
        opened(path, tokenizer, **options)
    assert not list((path.parent / "cache").glob("corpora/*/meta.json")) or options
    return str(caught.value)


PAIR = {"prompt": "a", "completion": "b"}
CHAT = {"messages": turns("a", "b")}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ({"prompt": "a"}, "line 3 has no 'completion'"),
        ({"completion": "a"}, "line 3 has no 'prompt'"),
        ({"prompt": "a", "completion": ""}, "line 3: its completion is empty"),
        ({"prompt": "a", "completion": " \n"}, "line 3: its completion is empty"),
        ({"prompt": ["a"], "completion": "b"}, "line 3: 'prompt' is ['a'], it must be a string"),
        ({"prompt": "a", "completion": None}, "line 3: 'completion' is None, it must be a string"),
        ({**PAIR, "label": False}, "line 3: 'label' is false, so its answer is a bad one"),
        (
            {"prompt": "a", "chosen": "b", "rejected": "c"},
            "line 3: 'chosen' and 'rejected' are a pair for preference training",
        ),
        ({"text": "a"}, "line 3 holds a text, and the data begins with prompt and completion"),
        (CHAT, "line 3 holds messages, and the data begins with prompt and completion"),
        (["a"], "line 3 holds no known fields, and the data begins with prompt and completion"),
        ({}, "line 3 holds no known fields, and the data begins with prompt and completion"),
    ],
)
def test_a_bad_pair_is_refused_with_its_line(tmp_path: Path, line: Any, expected: str) -> None:
    path = write(tmp_path / "pairs.jsonl", [PAIR, PAIR, line, PAIR])
    assert f"{path} {expected}" in refusal(path)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ({"messages": []}, "line 2: no message is of role assistant"),
        ({"messages": turns("a")}, "line 2: no message is of role assistant"),
        ({"messages": "hello"}, "line 2: 'messages' is 'hello', it must be a list of objects"),
        ({"messages": ["a"]}, "line 2: 'messages' is ['a'], it must be a list of objects"),
        ({"messages": [{"role": "user"}]}, "line 2, message 1 has no 'content'"),
        ({"messages": [{"content": "a"}]}, "line 2, message 1 has no 'role'"),
        ({"messages": turns("a", "  ")}, "line 2, message 2: the assistant's content is empty"),
        (
            {"messages": [*turns("a", "b"), {"role": "critic", "content": "hm"}]},
            "line 2: the chat template of",
        ),
        ({**CHAT, "label": False}, "line 2: 'label' is false, so its answer is a bad one"),
        (PAIR, "line 2 holds prompt and completion, and the data begins with messages"),
    ],
)
def test_a_bad_chat_is_refused_with_its_line(tmp_path: Path, line: Any, expected: str) -> None:
    folder = chat_tokenizer(tmp_path / "tokenizer", LLAMA2)
    path = write(tmp_path / "chats.jsonl", [{**CHAT, "label": True}, line, CHAT])
    message = refusal(path, f"hf:{folder}")
    assert f"{path} {expected}" in message
    if "critic" in str(line):
        assert "only user and assistant roles are supported" in message


def test_a_role_that_a_template_leaves_out_is_not_ignored(tmp_path: Path) -> None:
    folder = chat_tokenizer(tmp_path / "tokenizer", QUIET)
    bad = {"messages": [{"role": "critic", "content": "hm"}, *turns("a", "b")]}
    message = refusal(write(tmp_path / "chats.jsonl", [CHAT, bad, CHAT]), f"hf:{folder}")
    assert "line 2: the chat template of" in message
    assert "leaves out or changes message 1, of role 'critic'" in message


def test_messages_need_a_tokenizer_with_a_template(tmp_path: Path) -> None:
    path = write(tmp_path / "chats.jsonl", [CHAT] * 5)
    for tokenizer in ("byte", "bpe"):
        assert f"holds messages, and --tokenizer {tokenizer} has no chat" in refusal(
            path, tokenizer
        )
    folder = chat_tokenizer(tmp_path / "tokenizer", None)
    assert "has no chat template: give --tokenizer hf:NAME, of a chat model" in refusal(
        path, f"hf:{folder}"
    )


def test_the_template_beside_a_tokenizer_json_writes_messages(tmp_path: Path) -> None:
    folder = chat_tokenizer(tmp_path / "tokenizer", CHATML)
    path = write(tmp_path / "chats.jsonl", [CHAT] * 40)
    by_file = opened(path, str(folder / "tokenizer.json")).train
    by_name = opened(path, f"hf:{folder}").train
    assert by_file.tokens.tolist() == by_name.tokens.tolist()
    assert by_file.learned is not None
    assert by_name.learned is not None
    assert by_file.learned.tolist() == by_name.learned.tolist()
    # Another template is another corpus, whatever is in the cache.
    chat_tokenizer(folder, CHATML.replace("<|im_end|>", "<|im_end|><|im_end|>"))
    again = opened(path, str(folder / "tokenizer.json")).train
    assert len(again.tokens) > len(by_file.tokens)


def test_a_document_ends_with_the_token_that_the_files_beside_a_tokenizer_json_name(
    tmp_path: Path,
) -> None:
    folder = chat_tokenizer(tmp_path / "tokenizer", CHATML)  # <|endoftext|> is a token of it, too
    path = write(tmp_path / "pairs.jsonl", pairs(40))
    by_file, by_name = (opened(path, name) for name in (f"{folder}/tokenizer.json", f"hf:{folder}"))
    end = load_encoder(f"hf:{folder}").end_of_text
    assert load_encoder(f"hf:{folder}").decode([end], special=True) == "<|im_end|>"
    for corpus in (by_file, by_name):
        assert corpus.first_document.tokens[-1] == end
        assert load_encoder(str(corpus.tokenizer_path)).end_of_text == end
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        (folder / name).unlink()
    (folder / "config.json").write_text('{"eos_token_id": [3, 4]}')
    assert opened(path, f"{folder}/tokenizer.json").first_document.tokens[-1] == 3
    (folder / "config.json").write_text('{"eos_token_id": 12345}')  # of another tokenizer
    assert opened(path, f"{folder}/tokenizer.json").first_document.tokens[-1] == 0


def test_a_document_begins_as_the_tokenizer_begins_a_prompt(tmp_path: Path) -> None:
    folder = chat_tokenizer(tmp_path / "tokenizer", CHATML)
    file = str(folder / "tokenizer.json")
    tokenizer = Tokenizer.from_file(file)
    begin = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", begin)]
    )
    tokenizer.save(file)
    corpus = opened(write(tmp_path / "pairs.jsonl", pairs(40)), file)
    first = corpus.first_document
    prompt = load_encoder(file).encode_prompt(pairs(40)[0]["prompt"])
    assert first.tokens[: len(prompt)].tolist()[0] == begin == prompt[0]
    assert first.learned is not None
    assert not first.learned[0]
    assert first.learned[-1]
    texts = write(tmp_path / "texts.jsonl", [{"text": f"<s>number {n}"} for n in range(200)])
    tokens = opened(texts, file).train.tokens  # that begin with it already
    assert (tokens == begin).sum() == (tokens == load_encoder(file).end_of_text).sum()
    chats = opened(write(tmp_path / "chats.jsonl", [CHAT] * 40), file)
    assert begin not in chats.train.tokens  # a template says how it begins


def test_what_is_beside_a_tokenizer_of_a_name_is_kept(tmp_path: Path) -> None:
    folder = chat_tokenizer(tmp_path / "tokenizer", CHATML)
    corpus = opened(write(tmp_path / "pairs.jsonl", pairs(40)), f"hf:{folder}")
    run = tmp_path / "run"
    run.mkdir()
    assert carry_beside(str(corpus.tokenizer_path), run)
    shutil.copyfile(str(corpus.tokenizer_path), run / "tokenizer.json")
    names = (f"{run}/tokenizer.json", f"hf:{folder}")
    kept, named = (ChatTemplate.of(name, "").prompt(turns("a")) for name in names)
    assert kept == named


def test_a_list_of_examples_in_a_folder_is_not_left_out(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "README.md").write_text("About this data set. " * 100)
    (tmp_path / "data" / "info.json").write_text('{"version": 1}')
    (tmp_path / "data" / "train.json").write_text(json.dumps([PAIR] * 40))
    assert "train.json in that folder holds a list" in refusal(tmp_path / "data")
    (tmp_path / "data" / "train.json").unlink()
    assert opened(tmp_path / "data").first_document.learned is None


def test_a_readme_beside_examples_is_none_of_them(tmp_path: Path) -> None:
    """As in a clone of a dataset with a training split alone."""
    (tmp_path / "data").mkdir()
    write(tmp_path / "data" / "train.jsonl", [PAIR] * 400)
    (tmp_path / "data" / "README.md").write_text("About this data set. " * 100)
    assert "(prompt and completion): 400 documents" in opened(tmp_path / "data").description


def test_messages_without_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = chat_tokenizer(tmp_path / "tokenizer", CHATML)
    path = write(tmp_path / "chats.jsonl", [CHAT] * 5)
    monkeypatch.setitem(sys.modules, "transformers", None)  # import raises ImportError
    message = refusal(path, f"hf:{folder}")
    assert "needs the library transformers" in message
    assert how_to_install("hf") in message


def test_the_first_file_of_a_folder_may_be_empty(tmp_path: Path) -> None:
    """Its records do not say the form, which decided that Alpaca's prompts were learned, too."""
    folder = tmp_path / "shards"
    folder.mkdir()
    (folder / "0.jsonl").write_text("")
    records = [
        {"instruction": f"{n} + {n}", "input": "", "output": str(2 * n), "text": "all of it"}
        for n in range(40)
    ]
    write(folder / "1.jsonl", records)
    corpus = opened(folder)
    assert "(instruction and output)" in corpus.description
    assert corpus.train.learned is not None


def test_examples_beside_plain_text(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    write(folder / "pairs.jsonl", [PAIR] * 5)
    (folder / "book.txt").write_text("A book. " * 50)
    assert "pairs.jsonl does not hold plain texts, and book.txt does" in refusal(folder)


def test_what_the_mask_cannot_be_given_for(tmp_path: Path) -> None:
    texts = write(tmp_path / "texts.jsonl", [{"text": f"number {n}"} for n in range(120)])
    assert "has no prompts" in refusal(texts, mask_prompt=True)
    long = [{"prompt": "p" * 400, "completion": "c"} for _ in range(12)]
    path = write(tmp_path / "long.jsonl", long)
    assert "has no token to learn in its sequences of --seq-len 330" in refusal(path, seq_len=330)
    assert opened(path, seq_len=330, mask_prompt=False).train.learned is None


def test_a_bad_line_ends_a_run_with_one_sentence_and_leaves_nothing(tmp_path: Path) -> None:
    path = write(tmp_path / "pairs.jsonl", [PAIR, {"prompt": "a", "completion": ""}])
    run = train(
        *(1, "--data", str(path), "--tokenizer", "byte"),
        *("--vocab-size", "257", "--out", str(tmp_path / "run"), "--device", "cpu"),
    )
    assert run.returncode == 2
    assert run.stderr.splitlines()[-1] == (
        f"shardscale: {path} line 2: its completion is empty, so there is nothing to learn: write "
        "one, or remove the line"
    )
    assert not (tmp_path / "run").exists()


SAYS = {"instruction": "Add the numbers.", "input": "2 and 2", "output": "The answer is 4."}
ALPACA = [{**SAYS, "output": f"The answer is {n}.", "text": "unused"} for n in range(30)]
SHAREGPT = [
    {
        "system": "You add.",
        "conversations": [
            {"from": "human", "value": "What is 2 and 2?"},
            {"from": "gpt", "value": f"The answer is {n}."},
        ],
    }
    for n in range(30)
]


def first_example(corpus: Corpus, tokenizer: str) -> tuple[str, str]:
    """The first document as the model sees it, and what of it is learned."""
    shown = corpus.first_document
    assert shown.learned is not None
    decode = partial(load_encoder(tokenizer).decode, special=True)
    return decode(shown.tokens.tolist()), decode(shown.tokens[shown.learned > 0].tolist())


def test_alpacas_instructions_become_its_prompt_without_a_template(tmp_path: Path) -> None:
    for path in (tmp_path / "data.json", tmp_path / "data.jsonl"):
        whole = path.suffix == ".json"
        path.write_text(json.dumps(ALPACA) if whole else "\n".join(map(json.dumps, ALPACA)))
        corpus = opened(path)
        assert f"{path} (instruction and output): 30 documents" in corpus.description
        text, learned = first_example(corpus, "byte")
        assert text.startswith("Below is an instruction that describes a task, paired with an in")
        assert "### Instruction:\nAdd the numbers.\n\n### Input:\n2 and 2\n\n### Resp" in text
        assert learned.startswith("The answer is ")
        assert learned.endswith("<|endoftext|>")


@pytest.mark.parametrize("records", [ALPACA, SHAREGPT], ids=["alpaca", "sharegpt"])
def test_conversations_go_through_the_chat_template(records: list[Any], tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    tokenizer = f"hf:{chat_tokenizer(tmp_path / 'chat', CHATML)}"
    text, learned = first_example(
        opened(write(tmp_path / "d.jsonl", records), tokenizer), tokenizer
    )
    asked = "Add the numbers.\n\n2 and 2" if records is ALPACA else "What is 2 and 2?"
    system = "" if records is ALPACA else "<|im_start|>system\nYou add.<|im_end|>"
    assert text.startswith(f"{system}<|im_start|>user\n{asked}<|im_end|><|im_start|>assistant\n")
    assert learned.startswith("The answer is ")
    assert learned.endswith(".<|im_end|>")


def test_the_history_of_alpacas_instructions_comes_before_them(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    tokenizer = f"hf:{chat_tokenizer(tmp_path / 'chat', CHATML)}"
    lines: list[Any] = [
        {**one, "history": [["Hi!", "Hello."]], "system": "You add."} for one in ALPACA
    ]
    path = write(tmp_path / "d.jsonl", lines)
    assert "line 1: has a 'system', which only a chat template writes" in refusal(path)
    wrong = write(tmp_path / "wrong.jsonl", [{**SAYS, "history": ["Hi!"]}])
    says = "line 1: 'history' holds 'Hi!', it must be a list of pairs of texts"
    assert says in refusal(wrong, tokenizer)
    text, learned = first_example(opened(path, tokenizer), tokenizer)
    assert text.startswith(
        "<|im_start|>system\nYou add.<|im_end|><|im_start|>user\nHi!<|im_end|>"
        "<|im_start|>assistant\nHello.<|im_end|><|im_start|>user\nAdd the numbers."
    )
    assert learned.startswith("Hello.<|im_end|>The answer is ")


def test_a_turn_of_weight_0_is_not_learned(tmp_path: Path) -> None:
    """As Axolotl and OpenAI mark it."""
    pytest.importorskip("transformers")
    turns: Any = SHAREGPT[0]["conversations"]
    begun = [turns[0], {**turns[1], "weight": 0}, *turns]
    tokenizer = f"hf:{chat_tokenizer(tmp_path / 'chat', CHATML)}"
    path = write(tmp_path / "d.jsonl", [{"conversations": begun}] * 30)
    text, learned = first_example(opened(path, tokenizer), tokenizer)
    assert text.count("The answer is 0.") == 2
    assert learned == "The answer is 0.<|im_end|>"


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("d.json", "[{", "is not JSON"),
        ("d.json", "{}", "has no field 'text'"),
        (
            "d.json",
            json.dumps([SAYS, {"instruction": 1, "output": "x"}]),
            "example 2: 'instruction'",
        ),
        (
            "d.jsonl",
            json.dumps({"conversations": [{"from": "gtp", "value": "x"}]}),
            "'from' is 'gtp'",
        ),
        (
            "d.jsonl",
            json.dumps({"conversations": [{"from": "function_call", "value": "weather()"}]}),
            "turn 1: the value of its function_call is 'weather()', it must be a JSON object",
        ),
        (  # TRL's and LLaMA-Factory's pairs, without a prompt beside them
            "d.jsonl",
            json.dumps({"chosen": turns("a", "b"), "rejected": turns("a", "c")}),
            "d.jsonl line 1: 'chosen' and 'rejected' are a pair for preference training",
        ),
        (
            "d.jsonl",
            json.dumps({"conversations": SHAREGPT[0], "chosen": {}, "rejected": {}}),
            "d.jsonl line 1: 'chosen' and 'rejected' are a pair for preference training",
        ),
        ("d.jsonl", json.dumps({"conversations": "x"}), "must be a list of objects with from"),
    ],
)
def test_bad_examples_of_others_are_refused(
    name: str, content: str, says: str, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    (tmp_path / name).write_text(content)
    tokenizer = f"hf:{chat_tokenizer(tmp_path / 'chat', CHATML)}"
    with pytest.raises(UserError, match=re.escape(says)):
        opened(tmp_path / name, tokenizer)
