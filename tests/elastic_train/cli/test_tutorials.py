"""The tutorials of docs/models.md as they stand, from the data to the export; that on images is in test_init."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.conftest import ROOT, run_source
from tests.elastic_train.cli.test_init import typed
from tests.test_docs import code_of

pytestmark = pytest.mark.long


def section(title: str) -> str:
    return (ROOT / "docs" / "models.md").read_text().partition(f"## {title}\n")[2].partition("\n## ")[0]


def follow(text: str, folder: Path) -> list[str]:
    """Type the commands of a section, all but the launch; return which they were."""
    done = []
    for line in code_of(text):
        if line.startswith("cd "):
            folder /= line.removeprefix("cd ")
        elif line.startswith("python "):
            made = run_source((folder / line.split()[1]).read_text(), cwd=folder)
            assert made.returncode == 0, made.stderr
        elif re.match(r"elastic-train \w", line) and " launch " not in line:
            typed(line, folder)
            done.append(line.split()[1])
    return done


def test_texts_become_a_language_model(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    commands = follow(section("From texts to a language model"), tmp_path)
    assert commands == ["data", "train", "generate", "evaluate", "export"]
    run = tmp_path / "runs" / "language"
    assert json.loads((run / "result.json").read_text())["metrics"]["perplexity"] < 1500
    assert {"model.safetensors", "tokenizer.json"} <= {path.name for path in (run / "hf-100").iterdir()}


def test_a_csv_becomes_a_classifier(tmp_path: Path) -> None:
    text = section("From a CSV to a classifier")
    [source] = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert run_source(source, cwd=tmp_path).returncode == 0
    assert follow(text, tmp_path) == ["data", "init", "train", "audit", "evaluate", "predict"]
    ended = json.loads((tmp_path / "functions" / "runs" / "first" / "result.json").read_text())
    assert ended["metrics"]["macro_f1"] > 0.8
    assert pq.read_table(tmp_path / "functions" / "predicted.parquet").column_names[:2] == ["id", "prediction"]


def test_chats_become_a_lora(tmp_path: Path) -> None:
    """The answers are learned in part, and the export is what peft and a chat need."""
    pytest.importorskip("peft")
    commands = follow(section("From chats to a LoRA"), tmp_path)
    assert commands == ["init", "data", "data", "train", "generate", "export"]
    run = tmp_path / "tuned" / "runs" / "first"
    assert json.loads((run / "result.json").read_text())["metrics"]["token_accuracy"] > 0.3
    assert {"adapter_model.safetensors", "tokenizer.json", "chat_template.jinja"} <= {
        path.name for path in (run / "hf-60").iterdir()
    }
