"""Layouts of chats: rows as the field writes them become messages, and rows that are no chat say why."""

from __future__ import annotations

import json
from typing import Any

import pytest

from elastic_train.data.chats.layouts import Layout, PreferenceLayout, UnfitError, layout_of, named_layout
from elastic_train.errors import ConfigError

HI, HELLO = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
SYSTEM = {"role": "system", "content": "Be brief."}


def messages_of(row: dict[str, Any]) -> list[dict[str, Any]]:
    layout = layout_of(list(row))
    assert layout is not None
    return list(layout.chat_of(row).messages)


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        ({"messages": [HI, HELLO], "prompt": "Hi"}, [HI, HELLO]),
        ({"messages": [SYSTEM, HI, HELLO], "system": "Be long."}, [SYSTEM, HI, HELLO]),
        ({"messages": '[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]'}, [HI, HELLO]),
        ({"messages": [{**SYSTEM, "content": " "}, HI, HELLO]}, [HI, HELLO]),
        ({"messages": [HI, {"role": "assistant", "content": [{"type": "text", "text": "Hel"}, "lo"]}]}, [HI, HELLO]),
        ({"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}, [HI, HELLO]),
        ({"conversation": [HI, HELLO], "system": "Be brief."}, [SYSTEM, HI, HELLO]),
        ({"instruction": "Hi", "input": "", "output": "Hello"}, [HI, HELLO]),
        (
            {"instruction": "Add.", "input": "1 and 2", "output": 3},
            [{"role": "user", "content": "Add.\n\n1 and 2"}, {"role": "assistant", "content": "3"}],
        ),
        (
            {"instruction": "Hi", "context": "a text", "response": "Hello", "category": "x"},
            [{"role": "user", "content": "Hi\n\na text"}, HELLO],
        ),
        (
            {"instruction": "Hi", "output": "Hello", "system": "Be brief.", "history": [["a", "b"]]},
            [SYSTEM, {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, HI, HELLO],
        ),
        ({"prompt": "Hi", "completion": "Hello"}, [HI, HELLO]),
        ({"prompt": [SYSTEM, HI], "completion": [HELLO]}, [SYSTEM, HI, HELLO]),
        ({"prompt": json.dumps([SYSTEM, HI]), "completion": json.dumps([HELLO])}, [SYSTEM, HI, HELLO]),
        ({"prompt": "Hi", "completion": "[{}]"}, [HI, {"role": "assistant", "content": "[{}]"}]),
        ({"prompt": "Hi", "response": "Hello", "score": 1}, [HI, HELLO]),
        ({"question": "Hi", "answer": "Hello"}, [HI, HELLO]),
        ({"query": "Hi", "response": "Hello"}, [HI, HELLO]),
        ({"input": "Hi", "output": "Hello"}, [HI, HELLO]),
    ],
)
def test_usual_layouts_are_found(row: dict[str, Any], messages: list[dict[str, Any]]) -> None:
    assert messages_of(row) == messages


@pytest.mark.parametrize("messages", [[HELLO], [HI, HELLO]])
def test_preferences_may_be_messages_in_json(messages: list[dict[str, Any]]) -> None:
    chosen, rejected = json.dumps(messages), json.dumps([*messages[:-1], {**HELLO, "content": "No"}])
    chats = PreferenceLayout().chats_of({"prompt": "Hi", "chosen": chosen, "rejected": rejected})
    assert [chat.messages for chat in chats] == [[HI, HELLO], [HI, {**HELLO, "content": "No"}]]


def test_calls_of_tools_stay_and_their_arguments_are_read() -> None:
    """Templates write arguments as JSON, so text that is JSON would be quoted twice; results may be empty."""
    call = {"type": "function", "function": {"name": "add", "arguments": '{"x": 1}'}}
    rows = [HI, {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": ""}, HELLO]
    chat = Layout(messages="messages").chat_of({"messages": rows, "tools": '[{"name": "add"}]'})
    assert chat.messages[1]["tool_calls"][0]["function"]["arguments"] == {"x": 1}
    assert chat.messages[1]["content"] == "" and chat.tools == [{"name": "add"}]


def without(content: object, **more: object) -> dict[str, Any]:
    return {"messages": [HI, {"role": "assistant", "content": content, **more}]}


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"messages": None, "id": 1}, "'messages' is null"),
        ({"messages": []}, "'messages' has no message; a message is {role, content}"),
        ({"messages": "Hi"}, "'messages' is a str, not a list of messages"),
        ({"messages": "[Hi"}, "'messages' is text that is not JSON"),
        ({"messages": [5]}, "message 1 is an int, not {role, content}"),
        ({"messages": ["Hi"]}, "message 1 is a str, not {role, content}"),
        ({"messages": [{"content": "Hi"}]}, "message 1 has no role; its keys are content"),
        ({"messages": [HI]}, "it has no message by the assistant to learn from; its roles are user"),
        ({"messages": [{"role": "user", "content": ""}, HELLO]}, "message 1, by the user, is empty"),
        (without(" \n"), "message 2, by the assistant, is empty"),
        (without(None), "message 2, by the assistant, is empty"),
        (without({"a": 1}), "the content of message 2 is a dict, not text"),
        (without([{"type": "image"}]), "message 2 has parts that are not text, such as an image"),
        (without("x", weight=0), "message 2 has weight 0, and all of the assistant's messages are learned from"),
        ({"messages": [HI, HELLO], "tools": "f(x)"}, "'tools' is text that is not JSON"),
        ({"messages": [HI, HELLO], "tools": ["f"]}, "'tools' is not a list of JSON schemas"),
        ({"instruction": "Hi", "output": ""}, "its 'output' is empty"),
        ({"instruction": "Hi", "output": "x", "history": ["a"]}, "'history' is not a list of pairs"),
    ],
)
def test_a_row_that_is_no_chat_says_why(row: dict[str, Any], why: str) -> None:
    with pytest.raises(UnfitError) as refused:
        messages_of(row)
    assert why in str(refused.value)


def test_columns_can_be_named() -> None:
    names = ["ask", "reply", "prompt", "completion"]
    assert named_layout(None, "ask", "reply", names) == Layout(prompt="ask", response="reply")
    assert named_layout("ask", None, None, names) == Layout(messages="ask")
    assert named_layout(None, None, None, names) is None
    for options in ((None, "ask", None), (None, None, "reply"), ("ask", "ask", "reply")):
        with pytest.raises(ConfigError, match="give --messages-key, or both of --prompt-key and --response-key"):
            named_layout(*options, names)
    with pytest.raises(ConfigError, match="no column 'replay'; did you mean 'reply'"):
        named_layout(None, "ask", "replay", names)
