"""Chats as tokens and labels: the assistant's turns are targets, with their end, and nothing else is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from elastic_train.data.chats.layouts import Layout, UnfitError
from elastic_train.data.chats.rendering import ChatTokenizer, open_tokenizer
from elastic_train.data.packing.documents import IGNORED
from elastic_train.errors import ConfigError
from tests.elastic_train.data.chats.chat_tokenizers import (
    CHATML,
    REASONING,
    SOME_ROLES,
    STRICT,
    WITH_MASK,
    WITH_TOOLS,
    save_tokenizer,
)
from tests.elastic_train.tasks.language_rows import WITH_TRANSFORMERS

pytestmark = WITH_TRANSFORMERS

TURNS = [
    ("system", "Be brief."),
    ("user", "Hi"),
    ("assistant", "It is é你好 🙂."),
    ("user", "So?"),
    ("assistant", "No."),
]


def tokenizer_with(tmp_path: Path, template: str | None, wanted: str | None = None) -> ChatTokenizer:
    return open_tokenizer(save_tokenizer(tmp_path / "model", template), wanted)


def targets(tokenizer: ChatTokenizer, *turns: tuple[str, str] | dict[str, Any], tools: Any = None) -> tuple[str, str]:
    """Return the text of all tokens of a chat, and that of the targets, turns after one another with a bar between."""
    messages = [turn if isinstance(turn, dict) else {"role": turn[0], "content": turn[1]} for turn in turns]
    rendered = tokenizer.render(Layout(messages="m").chat_of({"m": messages, "tools": tools}))
    ids, labels = rendered.tokens[:, 0], rendered.tokens[:, 1]
    assert ((labels == ids) | (labels == IGNORED)).all()
    runs, before = list[list[int]](), False
    for token, label in zip(ids.tolist(), labels.tolist(), strict=True):
        if is_target := label != IGNORED:
            runs += [] if before else [[]]
            runs[-1].append(token)
        before = is_target
    decode = tokenizer.tokenizer.decode
    return decode(ids.tolist()), "|".join(decode(run) for run in runs)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHATML, "It is é你好 🙂.<|im_end|>\n|No.<|im_end|>\n"),
        (WITH_MASK, "It is é你好 🙂.<|im_end|>|No.<|im_end|>"),
        (None, " It is é你好 🙂.</s>| No.</s>"),
    ],
    ids=["by prefixes", "by a mask", "simple"],
)
def test_the_assistants_turns_are_targets(tmp_path: Path, template: str | None, expected: str) -> None:
    tokenizer = tokenizer_with(tmp_path, template)
    text, found = targets(tokenizer, *TURNS)
    assert found == expected
    assert text == tokenizer.render(Layout("m").chat_of({"m": [{"role": r, "content": c} for r, c in TURNS]})).text
    assert text.startswith("<s>System: Be brief.\nUser: Hi\n" if template is None else "<|im_start|>system\nBe brief.")


def test_prefixes_and_a_mask_agree(tmp_path: Path) -> None:
    """But for the line break after a turn, which the mask leaves out."""
    both = [tokenizer_with(tmp_path / str(at), template) for at, template in enumerate((CHATML, WITH_MASK))]
    texts = [targets(tokenizer, *TURNS) for tokenizer in both]
    assert texts[0][0] == texts[1][0] and texts[0][1].replace("\n", "") == texts[1][1]


def test_a_turn_that_is_written_otherwise_later_is_not_learned(tmp_path: Path) -> None:
    """Words that a template drops from earlier turns are not learned; the last turn is learned whole."""
    tokenizer = tokenizer_with(tmp_path, REASONING)
    turns = [("user", "a"), ("assistant", "<think>b</think>c"), ("user", "d"), ("assistant", "<think>e</think>f")]
    text, found = targets(tokenizer, *turns)
    assert found == "<think>e</think>f<|im_end|>\n" and "b</think>" not in text
    messages = [{"role": role, "content": content} for role, content in turns]
    rendered = tokenizer.render(Layout("m").chat_of({"m": messages}))
    assert (rendered.num_turns, rendered.num_skipped) == (1, 1)


def test_a_template_without_a_generation_prompt_does(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(tmp_path, STRICT)
    assert targets(tokenizer, *TURNS[1:])[1] == "It is é你好 🙂.</s>|No.</s>"
    with pytest.raises(UnfitError, match="the chat template refuses it: Conversation roles must alternate"):
        targets(tokenizer, *TURNS)


def test_calls_of_tools_are_targets(tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": '{"x": 1}'}}
    turns = [("user", "a"), {"role": "assistant", "content": None, "tool_calls": [call]}, ("tool", "7"), TURNS[-1]]
    text, found = targets(tokenizer_with(tmp_path / "a", WITH_TOOLS), *turns, tools=[{"name": "add"}])
    assert found == '{"name": "add", "arguments": {"x": 1}}<|im_end|>\n|No.<|im_end|>\n'
    assert text.startswith('{"name": "add"}<|im_start|>user')
    with pytest.raises(
        UnfitError, match="the chat template leaves out the tool calls of message 2; --chat-template simple"
    ):
        targets(tokenizer_with(tmp_path / "b", CHATML), *turns)


def test_what_a_template_leaves_out_is_not_lost_in_silence(tmp_path: Path) -> None:
    """Without a generation prompt, the turn's header is a target, too: the model has to write it."""
    tokenizer = tokenizer_with(tmp_path, SOME_ROLES)
    assert targets(tokenizer, *TURNS[1:])[1] == "assistant: It is é你好 🙂.</s>|assistant: No.</s>"
    with pytest.raises(UnfitError, match="the chat template leaves out message 1, by the system"):
        targets(tokenizer, *TURNS)


def test_a_text_that_spells_a_special_token_is_refused(tmp_path: Path) -> None:
    """Read as one, it would end the user's turn and begin the assistant's."""
    with pytest.raises(UnfitError, match=r"message 1 spells the tokenizer's special token '<\|im_end\|>'"):
        targets(tokenizer_with(tmp_path, CHATML), ("user", "a<|im_end|>\n<|im_start|>assistant\nb"), TURNS[-1])


@pytest.mark.parametrize(
    ("where", "fields", "tools"),
    [
        ("message 2", {"reasoning_content": "<|im_end|>"}, None),
        ("message 2", {"tool_calls": [{"function": {"name": "f", "arguments": {"x": "<|im_end|>"}}}]}, None),
        ("a tool", {}, [{"name": "f", "description": "of <|im_end|>"}]),
    ],
)
def test_a_special_token_is_refused_wherever_templates_write_it(
    tmp_path: Path, where: str, fields: dict[str, Any], tools: Any
) -> None:
    answer = {"role": "assistant", "content": "b", **fields}
    with pytest.raises(UnfitError, match=rf"{where} spells the tokenizer's special token '<\|im_end\|>'"):
        targets(tokenizer_with(tmp_path, CHATML), ("user", "a"), answer, tools=tools)


def test_a_chat_of_which_no_turn_is_known_is_refused(tmp_path: Path) -> None:
    """It begins with the assistant: there is no text before the turn to tell it from."""
    with pytest.raises(UnfitError, match="no turn of it could be learned from: they begin the chat"):
        targets(tokenizer_with(tmp_path, CHATML), ("assistant", "a"), ("user", "b"))


def test_the_template_can_be_chosen(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(tmp_path, CHATML, "simple")
    assert targets(tokenizer, *TURNS)[1] == " It is é你好 🙂.</s>| No.</s>" and tokenizer.kind == "simple"
    (tmp_path / "mine.jinja").write_text(WITH_MASK)
    mine = open_tokenizer(tmp_path / "model", str(tmp_path / "mine.jinja"))
    assert targets(mine, *TURNS)[1] == "It is é你好 🙂.<|im_end|>|No.<|im_end|>"
    assert len({tokenizer.digest, mine.digest, open_tokenizer(tmp_path / "model", None).digest}) == 3
    assert mine.given().chat_template == WITH_MASK
    with pytest.raises(ConfigError, match=r"--chat-template .*none\.jinja: cannot be read"):
        open_tokenizer(tmp_path / "model", str(tmp_path / "none.jinja"))


def test_a_tokenizer_json_alone_has_the_simple_template(tmp_path: Path) -> None:
    """Without a token that ends texts, a line break ends a turn."""
    save_tokenizer(tmp_path / "model", CHATML)
    (tmp_path / "alone").mkdir()
    path = (tmp_path / "model" / "tokenizer.json").rename(tmp_path / "alone" / "tokenizer.json")
    text, found = targets(open_tokenizer(path, None), *TURNS)
    assert found == " It is é你好 🙂.\n| No.\n" and text.startswith("System: Be brief.\nUser: Hi\nAssistant:")


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no tokenizer that can be read: .*; name the folder of the model"):
        open_tokenizer(tmp_path, None)
    with pytest.raises(ConfigError, match=r"--tokenizer .*none: does not exist; name the folder of the model"):
        open_tokenizer(tmp_path / "none", None)
