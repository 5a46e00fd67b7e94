"""Imports of chats: files of any kind become packed rows of tokens and labels, and bad rows are named."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from elastic_train.data.chats.importing import ChatOptions, ImportedChats, find_layout, import_chats
from elastic_train.data.packing.pack import PackOptions, pack
from elastic_train.data.tables.importing import RowOptions, import_rows
from elastic_train.errors import ConfigError
from elastic_train.tasks.rows.tokenizing import write_tokenizer
from tests.elastic_train.data.chats.chat_tokenizers import CHATML, REASONING, save_tokenizer
from tests.elastic_train.tasks.language_rows import WITH_TRANSFORMERS

pytestmark = WITH_TRANSFORMERS


def chat(number: int) -> list[dict[str, Any]]:
    return [{"role": "user", "content": f"Is it {number}?"}, {"role": "assistant", "content": f"It is {number}."}]


def write_lines(path: Path, rows: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def imported(out: Path, files: list[Path], options: ChatOptions) -> ImportedChats:
    layout = find_layout(files, options, "text")
    assert layout is not None
    return import_chats(out, {"train": files}, "jsonl", layout, options)


def rows_in(folder: Path) -> list[dict[str, Any]]:
    return [row for path in sorted(folder.glob("*.parquet")) for row in pq.read_table(path).to_pylist()]


@pytest.fixture
def options(tmp_path: Path) -> ChatOptions:
    return ChatOptions(save_tokenizer(tmp_path / "model", CHATML), share=0)


def test_files_of_any_kind_are_the_same_chats(tmp_path: Path, options: ChatOptions) -> None:
    """JSON lines, with a byte order mark and blank lines; a JSON array; Parquet; a CSV whose answers are numbers."""
    rows = [{"messages": chat(number)} for number in range(9)]
    (tmp_path / "a.jsonl").write_text("\ufeff\n" + "\n\n".join(map(json.dumps, rows)))
    (tmp_path / "a.json").write_text(json.dumps(rows, indent=1))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    found = []
    for name in ("a.jsonl", "a.json", "a.parquet"):
        made = imported(tmp_path / f"out-{name}", [tmp_path / name], options)
        assert made.notes[0].startswith("9 chats of messages, 9 turns of the assistant, ")
        found.append(rows_in(tmp_path / f"out-{name}" / "train"))
    assert found[0] == found[1] == found[2] and len(found[0]) == 9
    (tmp_path / "a.csv").write_text('question,answer\nHow many?,1.10\n"So, why?",x\n')
    made = imported(tmp_path / "out-csv", [tmp_path / "a.csv"], options)
    assert made.notes[-1].endswith("[[1.10<|im_end|>\n]]")


def test_keys_of_one_row_do_not_get_into_another(tmp_path: Path, options: ChatOptions) -> None:
    """Arrow gives all rows of a table the same keys; those that a row does not have are null, and left out."""
    rows = [
        {"messages": [{**each, "name": "x"} for each in chat(1)], "system": "Be brief."},
        {"messages": chat(2), "tools": None},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    imported(tmp_path / "one", [write_lines(tmp_path / "a.jsonl", rows)], options)
    imported(tmp_path / "two", [tmp_path / "a.parquet"], options)
    assert rows_in(tmp_path / "one" / "train") == rows_in(tmp_path / "two" / "train")


def test_chats_are_split_packed_and_keep_their_template(tmp_path: Path, options: ChatOptions) -> None:
    """Equal chats are in one part; every target is in the packed rows once; the export has the template."""
    lines = write_lines(tmp_path / "a.jsonl", [{"messages": chat(number % 60)} for number in range(120)])
    options = replace(options, share=0.3, template="simple")
    made = imported(tmp_path / "out", [lines], options)
    train, validation = (rows_in(tmp_path / "out" / part) for part in ("train", "validation"))
    assert len(train) + len(validation) == 120 and not [row for row in train if row in validation] and validation
    assert not imported(tmp_path / "out", [lines], options).written.is_new
    with pytest.raises(ConfigError, match=r"made differently \(max_tokens\)"):
        imported(tmp_path / "out", [lines], replace(options, max_tokens=20))
    packed = pack(tmp_path / "packed", [tmp_path / "out"], PackOptions(64))
    num_targets = [sum(label != -100 for row in part for label in row["labels"]) for part in (train, validation)]
    assert [report.targets for report in packed.reports] == num_targets
    template = (tmp_path / "packed" / "train" / "chat_template.jinja").read_text()
    assert "{% generation %}" in template
    (tmp_path / "exported").mkdir()
    write_tokenizer(tmp_path / "model", made.written.manifests[0], tmp_path / "exported")
    import transformers

    loaded = transformers.AutoTokenizer.from_pretrained(str(tmp_path / "exported"))
    assert loaded.chat_template == template and loaded.eos_token == "</s>"


BAD = [
    ({"messages": chat(1)}, None),
    ("{broken", "row 2: is not JSON: Expecting .* at column 2$"),
    ([1], "row 3: is a list, not an object"),
    ({"text": "x"}, "row 4: it has no 'messages'; it has text"),
    ({"messages": [{"role": "user", "content": "\ud83d <s>"}, chat(1)[1]]}, "row 5: message 1 spells .* token '<s>'"),
    ({"messages": [{"role": "user", "content": "so " * 90}, chat(1)[1]]}, "row 6: its first 60 tokens have nothing to"),
    ({"messages": [{"role": "user", "content": "\ud83d\ud83d"}, chat(1)[1]]}, None),
    ({"messages": [*chat(1), {"role": "user", "content": "so " * 90}, chat(1)[1]]}, None),
]


def test_bad_rows_are_refused_together_or_left_out(tmp_path: Path, options: ChatOptions) -> None:
    lines = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row, _ in BAD)
    (tmp_path / "a.jsonl").write_text(lines)
    options = replace(options, max_tokens=60)
    with pytest.raises(ConfigError) as refused:
        imported(tmp_path / "out", [tmp_path / "a.jsonl"], options)
    *found, remedy = str(refused.value).splitlines()
    assert remedy == "correct these rows, or leave them out with --skip-unfit"
    for line, (_, why) in zip(found, [case for case in BAD if case[1]], strict=True):
        assert line.startswith(str(tmp_path / "a.jsonl"))
        assert re.search(str(why), line), line
    assert not (tmp_path / "out").exists()
    made = imported(tmp_path / "out", [tmp_path / "a.jsonl"], replace(options, skips=True))
    assert len(made.written.left_out) == 5 and len(rows_in(tmp_path / "out" / "train")) == 3
    assert "1 chat cut to 60 tokens" in made.notes


def test_an_unknown_role_is_reported_with_its_first_row(tmp_path: Path, options: ChatOptions) -> None:
    wrong = [{"role": "usr", "content": "Hi"}, chat(1)[1]]
    lines = write_lines(tmp_path / "a.jsonl", [{"messages": each} for each in (chat(1), wrong, wrong)])
    (note,) = (each for each in imported(tmp_path / "out", [lines], replace(options, share=0)).notes if "role" in each)
    assert note == (
        f"WARNING: {lines}: row 2: has the role 'usr', which is none of assistant, developer, system, tool, user; did "
        "you mean 'user'?"
    )


def test_turns_that_are_not_learned_are_counted(tmp_path: Path) -> None:
    turns = [{"role": role, "content": text} for role, text in (("user", "a"), ("assistant", "<think>b</think>c"))]
    lines = write_lines(tmp_path / "a.jsonl", [{"messages": [*turns, *turns]}])
    options = ChatOptions(save_tokenizer(tmp_path / "model", REASONING), share=0)
    made = imported(tmp_path / "out", [lines], options)
    assert made.notes[2].startswith(
        "1 turn of the assistant not learned from: they begin a chat, or the template writes"
    )


def test_preferences_have_the_tokens_of_both_answers(tmp_path: Path, options: ChatOptions) -> None:
    """Answers to a prompt, or whole chats; targets are those of the last turn alone."""
    turns = chat(1)
    rows = [
        {"prompt": "Is it 1?", "chosen": "It is 1.", "rejected": "No."},
        {"prompt": turns[:1], "chosen": turns[1:], "rejected": [{"role": "assistant", "content": "No."}]},
        {"prompt": "Is it 1?", "chosen": turns, "rejected": [turns[0], {"role": "assistant", "content": "No."}]},
        {"chosen": [*turns, *turns], "rejected": [*turns, turns[0], {"role": "assistant", "content": "No."}]},
        {"prompt": "a", "chosen": "b", "rejected": "b"},
        {"prompt": "a", "chosen": "b", "rejected": ""},
        {"prompt": "a", "chosen": "b", "rejected": [turns[0]]},
    ]
    lines = write_lines(tmp_path / "a.jsonl", rows)
    with pytest.raises(ConfigError) as refused:
        imported(tmp_path / "out", [lines], options)
    whys = ("what is chosen is what is rejected", "its 'rejected' is empty", "it has no message by the assistant")
    for line, why in zip(str(refused.value).splitlines(), whys, strict=False):
        assert why in line
    made = imported(tmp_path / "out", [lines], replace(options, skips=True))
    assert made.notes[0].startswith("8 chats of chosen and rejected, 8 turns")
    found = rows_in(tmp_path / "out" / "train")
    assert found[0] == found[1] == found[2]
    for row, begin in ((found[0], 0), (found[3], len(found[0]["chosen_ids"]))):
        assert row["chosen_ids"][begin:] == found[0]["chosen_ids"]
        assert row["chosen_labels"] == [-100] * begin + found[0]["chosen_labels"]
        assert row["rejected_labels"] == [-100] * begin + found[0]["rejected_labels"]


@pytest.mark.parametrize(
    ("row", "more", "why"),
    [
        ({"a": 1, "b": 2}, {}, r"row 1 has the columns a, b: no 'text' to tokenise .* and no chat, which is a list of"),
        ({"messages": chat(1)}, {"prompt_key": "ask"}, "give --messages-key, or both of"),
        ({"messages": chat(1)}, {"messages_key": "chats"}, "no column 'chats'; row 1 has messages"),
        ({"messages": chat(1)}, {"messages_key": "messages", "tokenizer": None}, "chats need --tokenizer: the folder"),
    ],
)
def test_an_unknown_layout_says_what_there_is(
    tmp_path: Path, options: ChatOptions, row: dict[str, Any], more: dict[str, Any], why: str
) -> None:
    lines = write_lines(tmp_path / "a.jsonl", [row])
    with pytest.raises(ConfigError, match=why):
        imported(tmp_path / "out", [lines], replace(options, **more))


def test_rows_of_text_stay_rows_of_text(tmp_path: Path, options: ChatOptions) -> None:
    """A column of text is tokenised as before, unless options name a chat; a model's folder names its tokenizer."""
    lines = write_lines(tmp_path / "a.jsonl", [{"text": "It is", "messages": chat(1)}])
    assert find_layout([lines], options, "text") is None
    assert find_layout([lines], replace(options, tokenizer=None), "text") is None
    assert str(find_layout([lines], replace(options, messages_key="messages"), "text")) == "messages"
    texts = write_lines(tmp_path / "b.jsonl", [{"text": "It is"}])
    made = import_rows(tmp_path / "out", {"train": [texts]}, "jsonl", RowOptions(tokenizer=options.tokenizer, share=0))
    assert made.manifests[0].tokenizer == "tokenizer.json"


def test_a_file_without_objects_is_named(tmp_path: Path, options: ChatOptions) -> None:
    for number, text in enumerate(("[[1], [2]]", "1\n2\n", "[{", "")):
        (tmp_path / f"{number}.json").write_text(text)
        with pytest.raises(ConfigError, match=rf"{number}\.json: (its first rows are|begins as|holds no rows)"):
            find_layout([tmp_path / f"{number}.json"], options, "text")


def test_a_file_of_another_encoding_is_named_with_its_remedy(tmp_path: Path, options: ChatOptions) -> None:
    """As long as it is noticed in the first rows, in lines or in an array."""
    line = json.dumps({"messages": chat(1)})
    for name, content in (
        ("windows.jsonl", line.replace("{", '{"name": "é", ', 1).encode("cp1252")),
        ("array.json", f'["é", {line}]'.encode("cp1252")),
        ("wide.jsonl", line.encode("utf-16")),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ConfigError, match=rf"{name}: line 1 is not UTF-8; .*`iconv -f "):
            find_layout([tmp_path / name], options, "text")
