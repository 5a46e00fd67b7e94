"""`elastic-train init`: a folder to start from, with a commented configuration and a task to change.

A starter is text: the configuration, which trains as it is once the named data are there, and task.py beside it, whose
class derives from a task of the package.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import fsspec

from elastic_train.cli.fine_tuning_trial import TRIAL
from elastic_train.cli.output import CONFIG
from elastic_train.config.yaml12 import write_flow
from elastic_train.data.corpora.origin import telling_if_full
from elastic_train.data.dataset.manifest import NAME, load_manifest
from elastic_train.data.parquet.sources import reaching
from elastic_train.errors import ConfigError
from elastic_train.tasks.rows.token_rows import check_lists

TASK = "task.py"
ROW_LENGTH = 1024
"""Most tokens of a packed row in a new configuration that fine-tunes a model of the user's."""


@dataclass(frozen=True, slots=True)
class Starter:
    """Files of a kind of job that `init` writes.

    `data` holds the commands that make a small dataset at `data/` from the files of `trial`; `own_data` those for the
    user's own file and model, where MODEL stands for the model's folder and LENGTH for the tokens of a row.
    `trial_keys` are for the training on the small dataset alone.

    Without `task`, `path` names a task of the package.
    """

    data: tuple[str, ...]
    params: str
    own_params: str
    more_data: str
    rest: str
    own_rest: str | None = None
    task: str | None = None
    path: str = "task:Mine        # the class in task.py"
    batch: str = """\
  global_batch: 64        # samples of a step, on however many ranks
  micro_batch: 16        # samples of a lane: at most global_batch / micro_batch ranks can train
"""
    best: str = "max macro_f1"
    own_data: tuple[str, ...] = ()
    trial: Mapping[str, str] = field(default_factory=dict)
    trial_keys: str = ""

    def files(self, data: str | None, model: str | None) -> Mapping[str, str]:
        """Return the files by name, for the small dataset or for one of the user's, a folder or URL."""
        folder, is_trial = data or "data", data is None and model is None
        has_validation = data is None or _has_manifest(f"{data}/validation")
        config = _CONFIG.format(
            train=write_flow(f"{folder}/train"),
            validation=write_flow(f"{folder}/validation" if has_validation else None),
            make="".join(f"#   {command}\n" for command in self.making(data, model)),
            keys=self.keys(data, model),
            path=self.path,
            params=_filled(self.params if is_trial else self.own_params, model, write_flow(model)),
            more_data=self.more_data,
            batch=self.batch,
            rest=self.rest if is_trial or self.own_rest is None else self.own_rest,
            best=self.best,
        )
        return {CONFIG: config, **({TASK: self.task} if self.task else {}), **(self.trial if is_trial else {})}

    def keys(self, data: str | None, model: str | None) -> str:
        """Return the keys after the configuration in the line that trains."""
        return self.trial_keys if data is None and model is None else ""

    def making(self, data: str | None, model: str | None) -> Sequence[str]:
        """Return the commands that make the dataset; none if there is one."""
        if data is not None:
            return ()
        return self.data if model is None else [_filled(each, model, shlex.quote(model)) for each in self.own_data]


def write_starter(kind: str, folder: Path, data: str | None, model: str | None = None) -> list[str]:
    """Write a starter's files, never over others; return the commands to go on with.

    Raises ConfigError if one of the files is there, or if there is no model to fine-tune, or no dataset at `data`.
    """
    starter = STARTERS[kind]
    if model is not None:
        model = _checked_model(kind, Path(model))
    if data is not None:
        if starter.own_data and model is None:
            raise ConfigError(f"init {kind} --data needs --model, the folder of the model whose tokens the data has")
        data = data.rstrip("/") if "://" in data else str(Path(data).absolute())
        manifest = load_manifest(f"{data}/train")
        if starter is not _IMAGES:
            check_lists(manifest, "input_ids")
    files = starter.files(data, model)
    there = [str(folder / name) for name in files if (folder / name).exists()]
    if there:
        raise ConfigError(f"{', '.join(there)}: already there; choose another folder, or remove what is there")
    _write(folder, files)
    return [
        f"cd {shlex.quote(str(folder))}",
        *starter.making(data, model),
        f"elastic-train train {CONFIG}{starter.keys(data, model)}",
    ]


def _write(folder: Path, files: Mapping[str, str]) -> None:
    """Write all files or none; raise StorageError if the disk is full."""
    with telling_if_full(folder):
        folder.mkdir(parents=True, exist_ok=True)
    try:
        with telling_if_full(folder):
            for name, text in files.items():
                (folder / name).write_text(text)
    except BaseException:
        for name in files:
            (folder / name).unlink(missing_ok=True)
        raise


def _checked_model(kind: str, model: Path) -> str:
    """Return the absolute path of a model's folder; ConfigError if it is none, or if the starter takes none."""
    if not STARTERS[kind].own_data:
        takes = next(name for name, starter in STARTERS.items() if starter.own_data)
        raise ConfigError(f"--model is for init {takes}; init {kind} trains a model of its own")
    if not (model / "config.json").is_file():
        raise ConfigError(
            f"--model {model}: is not the folder of a model of transformers, which has a config.json; nothing is "
            "downloaded, so clone the model or `save_pretrained` it first"
        )
    return str(model.absolute())


def _filled(text: str, model: str | None, shown: str) -> str:
    """Return a starter's text with the model's folder, written as `shown`, and the tokens of a row filled in."""
    return text if model is None else text.replace("LENGTH", str(_row_length(Path(model)))).replace("MODEL", shown)


def _row_length(model: Path) -> int:
    """Return the tokens of a packed row: ROW_LENGTH, or the model's positions if they are fewer."""
    try:
        config = json.loads((model / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{model / 'config.json'}: cannot be read: {error}; clone the model again") from error
    text = config.get("text_config", config)
    positions = [text.get(name) for name in ("max_position_embeddings", "n_positions")]
    return min([ROW_LENGTH, *(each for each in positions if isinstance(each, int))])


def _has_manifest(url: str) -> bool:
    with reaching(url):
        fs, root = fsspec.core.url_to_fs(url)
        return bool(fs.exists(f"{root}/{NAME}"))


_CONFIG = """\
# What is trained, on what, and how. All keys with their defaults: elastic-train keys
{make}#   elastic-train train config.yaml{keys}        # one process; the same line resumes
#   elastic-train launch config.yaml{keys} --ranks 2        # two, with the same bits; kill one and see
run:
  dir: runs/first        # everything that a run writes
  seed: 1        # of the order, the initial weights, dropout and augmentation
task:
  path: {path}
  params:
{params}data:
  train: {train}
  validation: {validation}
{more_data}batch:
{batch}{rest}checkpoint:
  every: 50 steps, 15 min        # what a fault costs at most, if all ranks are lost at once
  keep_last: 3
  # keep_best: {best}        # also keep the best of the validations
"""

_TASK = '''\
"""The task of this job: change it as you like. `elastic_train.Task` lists the methods that a task needs."""

from torch import nn

from elastic_train.tasks.{module} import {name}


class Mine({name}):
    """The package's {what}, until a method is overridden."""

    def build_model(self) -> nn.Module:
        # {model}
        return super().build_model()
'''

_IMAGES = Starter(
    data=("elastic-train data import images data --digits",),
    params="""\
    size: 8        # pixels of each side that the model sees
    channels: 1        # 1 is grey, 3 is colour
    model: {width: 16, depth: 1}        # the package's ResNet-8; or hf: {config: {model_type: resnet, ...}}
    crop: shift        # resized for photographs, shift for small images, centre for none
    shift: 1
    flip: false        # mirrored, few digits are digits
    # mixup: 0.2
    # cutmix: 1.0
""",
    own_params="""\
    size: 64        # pixels of each side that the model sees
    channels: 3        # 1 is grey, 3 is colour
    model: {width: 32, depth: 3}        # the package's ResNet-20; or hf: {path: a model's local folder}
    crop: resized        # resized for photographs, shift for small images, centre for none
    flip: true
    # mixup: 0.2
    # cutmix: 1.0
""",
    more_data="",
    rest="""\
optimizer: {lr: 3.0e-3, weight_decay: 0.05, warmup_steps: 0.05}
validation: {every: 50 steps}
epochs: 3
""",
    own_rest="""\
optimizer: {lr: 2.0e-3, weight_decay: 0.05, warmup_steps: 0.05}        # 1.0e-4 to fine-tune a model's folder
validation: {every: 1 epoch}
epochs: 10
""",
    task=_TASK.format(
        module="image_classifier",
        name="ImageClassifier",
        what="image classifier",
        model="Any module that maps images (batch, channels, size, size) to logits (batch, self.num_classes).",
    ),
)

_TEXT = Starter(
    data=("elastic-train data import docstrings data --samples 2000",),
    params="""\
    max_tokens: 64        # of a text; longer ones are cut, see data.too_long
    dim: 64
    depth: 2
    heads: 4
    dropout: 0.1
    # class_weights: balanced        # for rare classes
""",
    own_params="""\
    max_tokens: 256        # of a text; longer ones are cut, see data.too_long
    dim: 128
    depth: 2
    heads: 4
    dropout: 0.1
    # class_weights: balanced        # for rare classes
""",
    more_data="  too_long: truncate        # texts of more tokens are cut, and counted; fail refuses them\n",
    rest="""\
optimizer: {lr: 2.0e-3, warmup_steps: 0.05}
validation: {every: 50 steps}
epochs: 3
""",
    own_rest="""\
optimizer: {lr: 1.0e-3, warmup_steps: 0.05}
validation: {every: 1 epoch}
epochs: 3
""",
    task=_TASK.format(
        module="text_classifier",
        name="TextClassifier",
        what="text classifier",
        model="Called with tokens, lengths, numeric, is_missing and categories, and returns logits (batch, classes).",
    ),
)

_LM = Starter(
    data=(
        "elastic-train data import docstrings texts --samples 2000",
        "elastic-train data pack data texts --length 128",
    ),
    params="""\
    max_tokens: 128        # of a row
    model: {dim: 64, depth: 2, heads: 4}        # the package's decoder; or hf: {config: {model_type: gpt2, ...}}
""",
    own_params="""\
    max_tokens: 1024        # of a row: as many as `elastic-train data pack --length` gave it
    model: {dim: 512, depth: 8, heads: 8, kv_heads: 4}        # or hf: {path: a model's local folder}
    # lora: {r: 8, target_modules: [q_proj, v_proj]}        # adapters of a folder's model
""",
    more_data="  too_long: truncate        # rows of more tokens are cut, and counted; fail refuses them\n",
    rest="""\
optimizer: {lr: 3.0e-3, weight_decay: 0.1, warmup_steps: 0.05}
validation: {every: 50 steps}
epochs: 3
""",
    own_rest="""\
optimizer: {lr: 6.0e-4, weight_decay: 0.1, warmup_steps: 0.05}        # 1.0e-5 to fine-tune hf, 2.0e-4 with lora
validation: {every: 50 steps}
epochs: 3
""",
    task=_TASK.format(
        module="causal_lm",
        name="CausalLM",
        what="language model",
        model="It is called with tokens, positions and mask, and returns logits (rows, width, self.vocabulary).",
    ),
)

_SFT = Starter(
    data=(
        "python trial.py        # a tiny model in base/, and chats.jsonl; needs the extra [hf]",
        "elastic-train data import rows chats chats.jsonl --tokenizer base --max-tokens 256",
        "elastic-train data pack data chats --length 256",
    ),
    own_data=(
        "cp YOUR_CHATS.jsonl chats.jsonl",
        "elastic-train data import rows chats chats.jsonl --tokenizer MODEL --max-tokens LENGTH",
        "elastic-train data pack data chats --length LENGTH",
    ),
    trial={"trial.py": TRIAL},
    trial_keys=" --optimizer.lr 5.0e-3",  # for weights that are random
    path="elastic_train.tasks.causal_lm:CausalLM        # or task:Mine, a class in task.py that derives from it",
    params="""\
    max_tokens: 256        # of a row: as many as `elastic-train data pack --length` gave it
    hf: {path: base}        # the folder of the model to be fine-tuned
    lora: {r: 16, lora_alpha: 32, lora_dropout: 0.05, target_modules: all-linear}
""",
    own_params="""\
    max_tokens: LENGTH        # of a row: as many as `elastic-train data pack --length` gave it
    hf: {path: MODEL}        # dtype: bfloat16 halves the memory of the weights that are not trained
    lora: {r: 16, lora_alpha: 32, lora_dropout: 0.05, target_modules: all-linear}        # without it, all weights train
""",
    more_data="  too_long: truncate        # rows of more tokens are cut, and counted; fail refuses them\n",
    batch="""\
  global_batch: 8        # packed rows of a step, on however many ranks
  micro_batch: 2        # rows of a lane: at most global_batch / micro_batch ranks can train
""",
    rest="""\
optimizer: {lr: 2.0e-4, weight_decay: 0, warmup_steps: 0.05, schedule: cosine}        # for random weights 5.0e-3
validation: {every: 50 steps}
epochs: 5
""",
    own_rest="""\
optimizer: {lr: 2.0e-4, weight_decay: 0, warmup_steps: 0.05, schedule: cosine}        # 1.0e-5 to train all weights
validation: {every: 50 steps}
epochs: 3
""",
    best="min loss",
)

STARTERS: Mapping[str, Starter] = {"text": _TEXT, "lm": _LM, "images": _IMAGES, "sft": _SFT}
