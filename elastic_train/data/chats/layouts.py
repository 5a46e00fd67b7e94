"""Layouts of chat data: which columns hold a chat, and the messages of a row.

A layout is a column of messages, or a prompt and its response; it is found by common names, or named by options.
Messages have the keys that chat templates read: `role`, `content`, and others of the row, such as `tool_calls`. A row
that is not a chat raises UnfitError with the reason.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elastic_train.errors import ConfigError
from elastic_train.system.wording import a, did_you_mean, nearest

Row = Mapping[str, Any]
Message = dict[str, Any]
ASSISTANT = "assistant"
_MESSAGES = ("messages", "conversations", "conversation")
_PAIRS = (
    *(("instruction", name) for name in ("output", "response")),
    *(("prompt", name) for name in ("completion", "response", "output")),
    ("question", "answer"),
    ("query", "response"),
    ("input", "output"),
)
_CONTEXTS = ("input", "context")
"""Columns with an instruction's input, appended to it, as in the datasets Alpaca and Dolly."""
_SYSTEMS = ("system", "system_prompt")
_ROLES = {
    "human": "user",
    **dict.fromkeys(("gpt", "bot", "chatgpt", "model", "ai", "function_call"), ASSISTANT),
    **dict.fromkeys(("observation", "function_response"), "tool"),
}
ROLES = frozenset(("system", "developer", "user", ASSISTANT, "tool"))
"""Roles that templates know."""
KNOWN = (
    "a list of {role, content} or {from, value} under messages or conversations, "
    "or a pair of columns: instruction and output, prompt and completion (or response), question and answer"
)
REMEDY = "name the columns with --messages-key, or with --prompt-key and --response-key"


class UnfitError(Exception):
    """Raised for a row that cannot be trained on, with the reason."""


@dataclass(frozen=True, slots=True)
class Chat:
    """Messages in order, and the tools that the assistant may call."""

    messages: Sequence[Message]
    tools: Sequence[Any] | None = None


@dataclass(frozen=True, slots=True)
class Layout:
    """The column of messages, or those of a prompt and its response."""

    messages: str | None = None
    prompt: str | None = None
    response: str | None = None

    def __str__(self) -> str:
        return self.messages or f"{self.prompt} and {self.response}"

    @property
    def columns(self) -> Sequence[str]:
        return [self.messages] if self.messages else [str(self.prompt), str(self.response)]

    def chats_of(self, row: Row) -> Sequence[Chat]:
        """Return the only chat of a row; raise UnfitError."""
        return [self.chat_of(row)]

    def chat_of(self, row: Row) -> Chat:
        """Return the chat of a row; raise UnfitError."""
        _check_filled(row, self.columns)
        if self.messages:
            messages = _messages_of(row[self.messages], self.messages)
        else:
            messages = [*_history_of(row), *self._prompt_of(row), *self._response_of(row)]
        system = next((row[name] for name in _SYSTEMS if isinstance(row.get(name), str) and row[name].strip()), None)
        if system is not None and messages and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": system}, *messages]
        _check_messages(messages)
        return Chat(messages, _tools_of(row))

    def _prompt_of(self, row: Row) -> list[Message]:
        prompt = _as_text(row[str(self.prompt)])
        if not isinstance(prompt, str):
            return _messages_of(prompt, str(self.prompt))
        contexts = [row[name] for name in _CONTEXTS if name != self.prompt and name != self.response and row.get(name)]
        return [{"role": "user", "content": "\n\n".join([prompt, *map(str, contexts)])}]

    def _response_of(self, row: Row) -> list[Message]:
        response = _as_text(row[str(self.response)])
        if not isinstance(response, str):
            return _messages_of(response, str(self.response))
        return [{"role": ASSISTANT, "content": response}]


@dataclass(frozen=True, slots=True)
class PreferenceLayout:
    """Two chats per row, the first one preferred: they differ in their last message, by the assistant."""

    columns: Sequence[str] = ("chosen", "rejected")

    def __str__(self) -> str:
        return " and ".join(self.columns)

    def chats_of(self, row: Row) -> Sequence[Chat]:
        """Return the chosen and the rejected chat; raise UnfitError."""
        _check_filled(row, self.columns)
        chats = [self._chat_of(row, name) for name in self.columns]
        if any(chat.messages[-1]["role"] != ASSISTANT for chat in chats):
            raise UnfitError("its last message is not by the assistant, in what is chosen or rejected")
        if chats[0].messages == chats[1].messages:
            raise UnfitError("what is chosen is what is rejected")
        return chats

    def _chat_of(self, row: Row, name: str) -> Chat:
        """Return a column's chat, which is whole or continues the prompt."""
        answer, prompt = _as_text(row[name]), row.get("prompt")
        is_whole = isinstance(answer, list) and _messages_of(answer, name)[0]["role"] != ASSISTANT
        if is_whole or prompt is None:
            return Layout(messages=name).chat_of(row)
        return Layout(prompt="prompt", response=name).chat_of(row)


AnyLayout = Layout | PreferenceLayout


def _check_filled(row: Row, columns: Sequence[str]) -> None:
    for name in columns:
        if name in row and row[name] is None:
            raise UnfitError(f"'{name}' is null")
        if name not in row:
            raise UnfitError(f"it has no '{name}'; it has {', '.join(row) or 'nothing'}")
        if isinstance(row[name], str) and not row[name].strip():
            raise UnfitError(f"its '{name}' is empty")


def layout_of(names: Sequence[str]) -> AnyLayout | None:
    """Return the layout of rows with these columns; None without common names."""
    if {"chosen", "rejected"} <= set(names):
        return PreferenceLayout()
    for name in _MESSAGES:
        if name in names:
            return Layout(messages=name)
    for prompt, response in _PAIRS:
        if prompt in names and response in names:
            return Layout(prompt=prompt, response=response)
    return None


def named_layout(messages: str | None, prompt: str | None, response: str | None, names: Sequence[str]) -> Layout | None:
    """Return the layout that options name, None if they name none; raise ConfigError if columns are missing."""
    if (prompt is None) != (response is None) or (messages and prompt):
        raise ConfigError("give --messages-key, or both of --prompt-key and --response-key")
    if messages is None and prompt is None:
        return None
    layout = Layout(messages, prompt, response)
    for name in layout.columns:
        if name not in names:
            raise ConfigError(
                f"no column '{name}'{did_you_mean(nearest(name, names)) or ';'} row 1 has {', '.join(names)}"
            )
    return layout


def _as_text(value: Any) -> Any:
    """Return a number as text, and text that is messages in JSON as these; anything else as it is."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        with contextlib.suppress(ValueError):
            found = json.loads(value)
            if found and all(isinstance(each, dict) and each.keys() & {"role", "from"} for each in found):
                return found
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def _messages_of(value: Any, column: str) -> list[Message]:
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = _parsed(value, column)
    if not isinstance(value, list) or not value:
        found = "has no message" if value == [] else f"is {a(type(value).__name__)}, not a list of messages"
        raise UnfitError(f"'{column}' {found}; a message is {{role, content}}")
    return [_message_of(each, number) for number, each in enumerate(value, start=1)]


def _message_of(given: Any, number: int) -> Message:
    if not isinstance(given, dict):
        raise UnfitError(f"message {number} is {a(type(given).__name__)}, not {{role, content}}")
    given = {name: value for name, value in given.items() if value is not None}
    role = given.pop("role", None) or given.pop("from", None)
    if not isinstance(role, str) or not role:
        raise UnfitError(f"message {number} has no role; its keys are {', '.join(given) or 'none'}")
    if given.get("weight") == 0:
        raise UnfitError(f"message {number} has weight 0, and all of the assistant's messages are learned from")
    content = given.pop("content", None)
    content = given.pop("value", None) if content is None else content
    calls = _calls_of(given.pop("tool_calls", None))
    message = {"role": _ROLES.get(role, role), **given, "content": _text_of(content, number)}
    if calls:
        message["tool_calls"] = calls
    return message


def _text_of(content: Any, number: int) -> str:
    """Return a content as text, from text or parts of text."""
    if isinstance(content, list):
        parts = [each.get("text") if isinstance(each, dict) else each for each in content]
        texts = [part for part in parts if isinstance(part, str)]
        if len(texts) < len(parts):
            raise UnfitError(f"message {number} has parts that are not text, such as an image")
        return "".join(texts)
    if content is not None and not isinstance(content, str):
        raise UnfitError(f"the content of message {number} is {a(type(content).__name__)}, not text")
    return content or ""


def _calls_of(calls: Any) -> list[Any]:
    """Return tool calls with arguments as mappings, which templates write as JSON."""
    found = []
    for call in calls if isinstance(calls, list) else []:
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            try:
                arguments = json.loads(function["arguments"])
            except ValueError:
                arguments = function["arguments"]
            call = {**call, "function": {**function, "arguments": arguments}}
        found.append(call)
    return found


def _history_of(row: Row) -> list[Message]:
    """Return the turns before the prompt: pairs of message and answer."""
    history = row.get("history") or []
    if not isinstance(history, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in history):
        raise UnfitError("'history' is not a list of pairs, each of a prompt and its response")
    return [
        {"role": role, "content": text}
        for pair in history
        for role, text in zip(("user", ASSISTANT), map(str, pair), strict=True)
    ]


def _tools_of(row: Row) -> Sequence[Any] | None:
    tools = row.get("tools")
    if isinstance(tools, str):
        tools = _parsed(tools, "tools") if tools.strip() else None
    if tools and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise UnfitError("'tools' is not a list of JSON schemas")
    return tools or None


def _parsed(text: str, column: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise UnfitError(f"'{column}' is text that is not JSON: {error}") from error


def _check_messages(messages: list[Message]) -> None:
    """Reject messages that are useless or harmful for training; remove empty system messages."""
    messages[:] = [each for each in messages if each["role"] != "system" or each["content"].strip()]
    for number, message in enumerate(messages, start=1):
        says = message["content"].strip() or message.get("tool_calls") or message.get("reasoning_content")
        if not says and message["role"] != "tool":
            raise UnfitError(f"message {number}, by the {message['role']}, is empty")
    if all(message["role"] != ASSISTANT for message in messages):
        roles = ", ".join(dict.fromkeys(message["role"] for message in messages))
        raise UnfitError(f"it has no message by the assistant to learn from; its roles are {roles or 'none'}")
