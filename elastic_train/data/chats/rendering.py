"""Render chats as tokens and labels, by a tokenizer's template or a simple one.

Labels are the tokens of the assistant's turns, and IGNORED elsewhere. Templates with `{% generation %}` mark these
turns themselves (`return_assistant_tokens_mask`). For others, the text before each turn is rendered as at inference,
with the generation prompt, and the text up to its end: if both are prefixes of the whole chat's text, the turn lies
between them. Other turns (of templates that render a turn differently once others follow, such as those that drop
earlier reasoning) are not learned from, and counted.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from elastic_train.data.chats.layouts import ASSISTANT, Chat, Message, UnfitError
from elastic_train.data.corpora import tokenizer as tokenise
from elastic_train.data.corpora.tokenizer import GivenTokenizer
from elastic_train.data.packing.bins import Tokens
from elastic_train.data.packing.documents import IGNORED
from elastic_train.errors import ConfigError
from elastic_train.system.extras import needed_for
from elastic_train.system.wording import first_line

SIMPLE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message.role == 'assistant' %}"
    "{{ 'Assistant:' }}{% generation %}{{ ' ' + message.content }}"
    "{% if message.tool_calls %}{{ message.tool_calls | tojson }}{% endif %}"
    "{{ eos_token or '\n' }}{% endgeneration %}{{ '\n' if eos_token }}"
    "{% else %}{{ message.role | capitalize + ': ' + message.content + '\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
"""Template for tokenizers without one: each turn starts with its role; the assistant's ends with the end token."""
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_MARK = "\N{SNOWMAN}"
_WRITTEN = ("content", "reasoning_content", "thinking", "tool_calls", "name")
"""Fields of a message that templates write as they are."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """A chat as text, its tokens with labels, shape (tokens, 2), and the number of assistant turns with targets."""

    text: str
    tokens: Tokens
    num_turns: int
    num_skipped: int


class ChatTokenizer:
    """A transformers tokenizer with the chat template in use.

    `template` is None for the tokenizer's own; `kind` names the template in messages.
    """

    def __init__(self, tokenizer: Any, wanted: str | None) -> None:
        self.tokenizer = tokenizer
        self.template: str | None = None
        if wanted is None and tokenizer.chat_template:
            self.kind = "the tokenizer's own"
        elif wanted is None or wanted == "simple":
            self.template, self.kind = SIMPLE, "simple"
        else:
            self.template, self.kind = _read_template(Path(wanted)), wanted
        self._special = sorted({str(token) for token in tokenizer.all_special_tokens if str(token).strip()})

    def given(self) -> GivenTokenizer:
        """Return the tokenizer as datasets store it: tokenizer.json and template."""
        file = Path(getattr(self.tokenizer, "name_or_path", "") or "") / tokenise.FILE_NAME
        backend = self.tokenizer.backend_tokenizer
        content = file.read_bytes() if file.is_file() else backend.to_str().encode()
        return GivenTokenizer(content, backend, self._whole_template)

    @property
    def digest(self) -> str:
        """Digest of everything that rendering depends on: tokenizer, special tokens, template."""
        special = repr(sorted(self.tokenizer.special_tokens_map.items()))
        template = self._whole_template or repr(self.tokenizer.chat_template)
        return hashlib.sha256(b"\0".join([self.given().content, template.encode(), special.encode()])).hexdigest()

    @property
    def _whole_template(self) -> str | None:
        """The template, None if the tokenizer has several."""
        template = self.template or self.tokenizer.chat_template
        return template if isinstance(template, str) else None

    @property
    def masks(self) -> str:
        """The method that finds the assistant's turns, in words."""
        return "its generation mask" if self._has_mask(None) else "the text before and after each turn"

    def render(self, chat: Chat) -> Rendered:
        """Return the tokens and labels of a chat; raise UnfitError if template or mask does not fit."""
        self._check_special(chat)
        text = self._text(chat.messages, chat.tools)
        self._check_all_there(chat, text)
        turns = [at for at, message in enumerate(chat.messages) if message["role"] == ASSISTANT]
        if self._has_mask(chat.tools):
            ids, is_target = self._masked(chat)
            num_turns = min(len(turns), int((np.diff(is_target, prepend=False) & is_target).sum()))
        else:
            spans = list(self._spans(chat, text, turns))
            num_turns = len(spans)
            ids, is_target = self._targets_within(text, spans)
        if not is_target.any():
            raise UnfitError(
                "no turn of it could be learned from: they begin the chat, or the template writes them otherwise when "
                "others follow; use --chat-template simple, or a FILE that has {% generation %} around them"
            )
        labels = np.where(is_target, ids, IGNORED).astype(np.int32)
        return Rendered(text, np.stack([ids, labels], axis=1), num_turns, len(turns) - num_turns)

    def shown(self, rendered: Rendered, most: int = 400) -> str:
        """Return the shortened text of a chat's tokens, with targets in [[ ]]."""
        ids, labels = rendered.tokens[:, 0], rendered.tokens[:, 1]
        is_target = labels != IGNORED
        ends = [0, *(np.flatnonzero(np.diff(is_target)) + 1).tolist(), len(ids)]
        runs = [(self.tokenizer.decode(ids[lo:hi].tolist()), is_target[lo]) for lo, hi in itertools.pairwise(ends)]
        whole = "".join(f"[[{text}]]" if learned else text for text, learned in runs)
        return whole if len(whole) <= most else f"{whole[: most // 2]} ... {whole[-most // 2 :]}"

    def _text(self, messages: Sequence[Message], tools: Sequence[Any] | None, *, goes_on: bool = False) -> str:
        """Render messages; raise UnfitError if the template rejects them."""
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    list(messages),
                    tools=tools,
                    chat_template=self.template,
                    tokenize=False,
                    add_generation_prompt=goes_on,
                )
            )
        except _template_errors() as error:
            raise UnfitError(f"the chat template refuses it: {error}") from error

    def _has_mask(self, tools: Sequence[Any] | None) -> bool:
        template = self.tokenizer.get_chat_template(self.template, tools)
        return _GENERATION.search(template) is not None

    def _masked(self, chat: Chat) -> tuple[Tokens, np.ndarray[Any, np.dtype[np.bool_]]]:
        found = self.tokenizer.apply_chat_template(
            list(chat.messages),
            tools=chat.tools,
            chat_template=self.template,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        return np.array(found["input_ids"], dtype=np.int32), np.array(found["assistant_masks"], dtype=bool)

    def _targets_within(
        self, text: str, spans: Sequence[tuple[int, int]]
    ) -> tuple[Tokens, np.ndarray[Any, np.dtype[np.bool_]]]:
        """Return the tokens of a text, and a mask of those within the character spans [lo, hi)."""
        found = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids = np.array(found["input_ids"], dtype=np.int32)
        offsets = np.array(found["offset_mapping"], dtype=np.int64).reshape(-1, 2)
        is_target = np.zeros(len(ids), dtype=bool)
        for lo, hi in spans:
            is_target |= (lo <= offsets[:, 0]) & (offsets[:, 1] <= hi) & (offsets[:, 0] < offsets[:, 1])
        return ids, is_target

    def _spans(self, chat: Chat, text: str, turns: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yield the spans of the turns in the chat's text, where known."""
        for at in turns:
            try:
                before = self._text(chat.messages[:at], chat.tools, goes_on=True) if at else None
                upto = self._text(chat.messages[: at + 1], chat.tools)
            except UnfitError:
                continue
            if before is not None and upto.startswith(before) and text.startswith(upto) and len(upto) > len(before):
                yield len(before), len(upto)

    def _check_special(self, chat: Chat) -> None:
        """Reject a chat with a text that spells a special token, which would end a turn or begin another."""
        written = [(f"message {at}", [each.get(name) for name in _WRITTEN]) for at, each in enumerate(chat.messages, 1)]
        for where, values in (*written, ("a tool", chat.tools)):
            texts = [*_texts_in(values)]
            if found := next((token for token in self._special if any(token in text for text in texts)), None):
                raise UnfitError(f"{where} spells the tokenizer's special token '{found}', which would be read as one")

    def _check_all_there(self, chat: Chat, text: str) -> None:
        """Reject a chat if the template drops a message that is not the assistant's, or a tool call."""
        for at, message in enumerate(chat.messages):
            content, calls = message["content"].strip(), message.get("tool_calls")
            if message["role"] != ASSISTANT and content and content not in text:
                changed, what = {**message, "content": content + _MARK}, f"message {at + 1}, by the {message['role']}"
            elif calls:
                changed, what = {**message, "tool_calls": []}, f"the tool calls of message {at + 1}"
            else:
                continue
            if self._is_unseen(chat, at, changed, text):
                raise UnfitError(f"the chat template leaves out {what}; --chat-template simple writes all")

    def _is_unseen(self, chat: Chat, at: int, changed: Message, text: str) -> bool:
        """Return True if changing a message does not change the chat's text."""
        try:
            return self._text([*chat.messages[:at], changed, *chat.messages[at + 1 :]], chat.tools) == text
        except UnfitError:  # the template does read it
            return False


def _texts_in(value: Any) -> Iterator[str]:
    """Yield the texts in nested lists and mappings."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _texts_in([*value, *value.values()])
    elif isinstance(value, Sequence):
        for each in value:
            yield from _texts_in(each)


def last_turn_of(rendered: Rendered) -> Rendered:
    """Return a chat in which only the last turn with targets has them."""
    is_masked = rendered.tokens[:, 1] == IGNORED
    last = int(np.flatnonzero(~is_masked)[-1])
    begin = int(np.flatnonzero(is_masked[:last])[-1]) + 1 if is_masked[:last].any() else 0
    tokens = rendered.tokens.copy()
    tokens[:begin, 1] = IGNORED
    return replace(rendered, tokens=tokens, num_turns=1, num_skipped=0)


def open_tokenizer(path: Path, template: str | None) -> ChatTokenizer:
    """Open a model's folder or a tokenizer.json; raise ConfigError if it has no usable tokenizer."""
    with needed_for("importing chats"):
        import transformers
    if not path.exists():
        raise ConfigError(f"--tokenizer {path}: does not exist; name the folder of the model to be fine-tuned")
    folder = path if path.is_dir() else path.parent
    transformers.utils.logging.set_verbosity_error()
    try:
        if path.is_dir() or (folder / "tokenizer_config.json").is_file():
            tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        else:
            tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(path))
    except Exception as error:
        raise ConfigError(
            f"{path}: has no tokenizer that can be read: {first_line(error)}; name the folder of the model to be "
            "fine-tuned"
        ) from error
    if not getattr(tokenizer, "is_fast", False):
        raise ConfigError(f"{path}: its tokenizer does not say where tokens are in a text; add its tokenizer.json")
    return ChatTokenizer(tokenizer, template)


def _read_template(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--chat-template {path}: cannot be read: {error}; give a Jinja file, or 'simple'") from error


@functools.cache
def _template_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions that a template raises for messages it does not accept."""
    import jinja2

    return (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError)
