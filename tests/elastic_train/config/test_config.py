"""The configuration: layers, errors, and what follows from the keys."""

import contextlib
import math
import pickle
import re
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from elastic_train.config import schema as configuration
from elastic_train.config import section, sources, yaml12
from elastic_train.config.checkpoints import CheckpointConfig
from elastic_train.config.monitoring import MonitoringConfig
from elastic_train.config.recipe import ValidationConfig
from elastic_train.config.schema import Config
from elastic_train.config.sources import nearest_key
from elastic_train.errors import ConfigError

GOOD = {"data": {"train": "somewhere"}}


def write(folder: Path, tree: object) -> Path:
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def load(folder: Path, tree: object, *, environ: dict[str, str] | None = None, arguments: tuple[str, ...] = ()):
    return sources.load(write(folder, tree), environ=environ or {}, arguments=arguments)


def test_a_value_that_a_later_one_replaces_on_a_command_line_is_said():
    """In either spelling, and with its section; the same value twice is no matter."""
    said = sources.given_twice
    assert said(["--max_steps", "3", "--max-steps=4", "--max_steps", "4"]) == [
        "command line: 'max_steps' is given as 3, and then 'max_steps' as 4, which counts"
    ]
    assert said(["--batch.micro_batch", "2", "--batch", "{micro_batch: 4}"]) == [
        "command line: 'batch.micro_batch' is given as 2, and then 'batch' as {'micro_batch': 4}, which counts"
    ]
    assert (
        said(["--batch", "{micro_batch: 4}", "--batch.micro_batch", "2", "--max_steps", "1", "--max_steps", "1"]) == []
    )


def test_later_sources_win(tmp_path):
    """YAML is overridden by the environment, and that by the command line."""
    tree = {**GOOD, "batch": {"global_batch": 8, "micro_batch": 1}, "epochs": 2}
    environ = {"ELASTIC_TRAIN__BATCH__MICRO_BATCH": "2", "ELASTIC_TRAIN__EPOCHS": "3", "UNRELATED": "x"}
    config = load(tmp_path, tree, environ=environ, arguments=("--epochs", "4", "--optimizer.weight-decay=1e-3"))
    assert (config.batch.global_batch, config.batch.micro_batch, config.epochs) == (8, 2, 4)
    assert config.optimizer.weight_decay == 1e-3


def test_lanes_follow_from_the_batch_keys(tmp_path):
    """The number of lanes is global_batch / micro_batch."""
    config = load(tmp_path, {**GOOD, "batch": {"global_batch": 12, "micro_batch": 4}})
    assert config.batch.num_lanes == 3


@pytest.mark.parametrize(
    ("tree", "environ", "arguments", "expected"),
    [
        ({**GOOD, "batch": {"global_bach": 8}}, {}, (), ["config.yaml:2", "batch.global_bach", "batch.global_batch"]),
        ({**GOOD, "modle": 1}, {}, (), ["unknown key 'modle'"]),
        (
            {**GOOD, "batch": 5},
            {},
            (),
            ["'batch' is a section with keys: write {KEY: VALUE} or --batch.KEY VALUE, given 5"],
        ),
        (GOOD, {}, ("--profile.at-steps", "5"), ["'profile.at_steps' takes a list: write [A, B], given 5"]),
        (
            GOOD,
            {},
            ("--profile.ranks", "x"),
            ["'profile.ranks': Input should be a list, as [A, B], or 'all', given 'x'"],
        ),
        (
            GOOD,
            {},
            ("--parallel.bucket-mb", "0"),
            ["'parallel.bucket_mb': Input should be greater than 0, or 'auto', given 0"],
        ),
        (GOOD, {}, ("--monitoring.on-event", "drop"), ["'monitoring.on_event' is a section with keys", "given 'drop'"]),
        ({**GOOD, "monitoring": {"on_event": {"loss_spike": "drop"}}}, {}, (), ["loss_spike concerns all ranks"]),
        ({}, {}, (), ["'data' is missing"]),
        ({**GOOD, "epochs": "many"}, {}, (), ["config.yaml:3", "'epochs'", "'many'"]),
        ({**GOOD, "epochs": 0}, {}, (), ["'epochs'", "greater than 0"]),
        ({**GOOD, "batch": {"global_batch": 10, "micro_batch": 4}}, {}, (), ["not a multiple", "8 and 12"]),
        (GOOD, {"ELASTIC_TRAIN__EPOCHS": "x"}, (), ["environment ELASTIC_TRAIN__EPOCHS"]),
        (GOOD, {}, ("--precision", "fp4"), ["command line --precision", "'fp4'"]),
        (GOOD, {}, ("--epochs",), ["--epochs needs a value"]),
        (GOOD, {}, ("epochs",), ["'epochs' is not an option"]),
        (GOOD, {}, ("--run.dri", "x"), ["command line --run.dri", "did you mean 'run.dir'"]),
        (GOOD, {}, ("--nonsense", "1"), ["unknown key 'nonsense'; `elastic-train keys` lists all"]),
        (GOOD, {}, ("--optimiser.lr", "1"), ["command line --optimiser.lr: unknown key 'optimiser'; did you mean"]),
        ([1], {}, (), ["must be a mapping"]),
        (GOOD, {}, ("--task.params.a", "[draft"), ["--task.params.a", "'[draft' is not valid YAML", "\"'[draft'\""]),
        (GOOD, {}, ("--task.params.a", "[draft] # 2"), ["'# 2' follows its end"]),
        (GOOD, {}, ("--task.params.a", "{b: 1, b: 2}"), ["duplicate key 'b'"]),
        (GOOD, {}, ("--run.name", "\udcff"), ["'run.name'", "Unicode"]),
        (GOOD, {}, ("--run.dir", ""), ["'run.dir': is empty"]),
        (GOOD, {}, ("--run.dir", "a/" + "b" * 300), ["'run.dir'", "255 bytes"]),
        (GOOD, {}, ("--optimizer.name", "AdamW"), ["given 'AdamW'; did you mean 'adamw'?"]),
        ({**GOOD, "run": {"name": 5}}, {}, (), ["'run.name': must be text: quote it, given 5"]),
        (GOOD, {}, ("--run.dir", "s3://bucket/run"), ["'run.dir'", "must be a local folder", "checkpoint.url"]),
        (GOOD, {}, ("--data.cache-dir", "file:///x"), ["'data.cache_dir'", "must be a local folder"]),
        (GOOD, {}, ("--checkpoint.near-dir", "s3://x"), ["'checkpoint.near_dir'", "must be a local folder"]),
    ],
)
def test_a_mistake_names_its_place_and_its_key(tmp_path, tree, environ, arguments, expected):
    """Each message says where, which key, and what would be right."""
    with pytest.raises(ConfigError) as raised:
        load(tmp_path, tree, environ=environ, arguments=arguments)
    for text in expected:
        assert text in str(raised.value)


def test_all_mistakes_are_reported_at_once(tmp_path):
    """Six mistakes from three sources, two of which are not valid YAML, give six problems."""
    tree = {"data": {"train": 3}, "batch": {"bogus": 1}}
    environ = {"ELASTIC_TRAIN__EPOCHS": "x", "ELASTIC_TRAIN__PROFILE__AT_STEPS": "@x"}
    with pytest.raises(ConfigError) as raised:
        load(tmp_path, tree, environ=environ, arguments=("--optimizer.lr", "-1", "--optimizer.options", "[x"))
    assert len(raised.value.problems) == 6


def test_the_resolved_configuration_reads_back_the_same(tmp_path):
    """to_yaml and load are inverse."""
    config = load(tmp_path, {**GOOD, "task": {"params": {"dim": 8}}, "optimizer": {"lr": 1e-5}})
    (tmp_path / "again.yaml").write_text(config.to_yaml())
    assert sources.load(tmp_path / "again.yaml", environ={}) == config


@pytest.mark.parametrize("text", ["1e-3", "-1E5", "2.5e7", ".5e+1", "7.e0"])
def test_numbers_are_parsed_the_same_in_every_source(tmp_path: Path, text: str) -> None:
    """In a task's parameters, too, whose types only the task knows; quoted values are text."""
    path, key = tmp_path / "written.yaml", "ELASTIC_TRAIN__TASK__PARAMS__B"
    path.write_text(f"data: {{train: x}}\ntask: {{params: {{a: {text}, text: '{text}'}}}}\nrun: {{name: '{text}'}}\n")
    config = sources.load(path, environ={key: text}, arguments=["--task.params.c", text])
    number = float(text)
    assert config.task.params == {"a": number, "b": number, "c": number, "text": text}
    assert config.run.name == text
    path.write_text(config.to_yaml())
    assert sources.load(path, environ={}) == config
    assert yaml.safe_load(config.to_yaml())["run"]["name"] == text


def test_python_only_number_syntax_stays_text(tmp_path: Path) -> None:
    """Text that Python alone reads as a number stays text."""
    assert load(tmp_path, GOOD, arguments=("--run.name", "nan")).run.name == "nan"
    assert load(tmp_path, GOOD, arguments=("--run.name", "1e5-b")).run.name == "1e5-b"
    assert load(tmp_path, GOOD, arguments=("--run.name", "infinity")).run.name == "infinity"


def test_a_duplicate_key_is_refused(tmp_path: Path) -> None:
    """All keys below the first one would be dropped silently."""
    path = tmp_path / "config.yaml"
    path.write_text("data:\n  train: a\noptimizer:\n  lr: 0.1\nepochs: 2\noptimizer:\n  name: sgd\n")
    with pytest.raises(ConfigError, match=r"config\.yaml:6: duplicate key 'optimizer' \(first on line 3\)"):
        sources.load(path, environ={})


def test_a_tilde_means_the_home_folder_in_every_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For every folder: it once held for datasets only, and runs went into a folder named ~."""
    monkeypatch.setenv("HOME", "/home/me")
    places = {"run": {"dir": "~/runs/./a"}, "checkpoint": {"url": "~/commits", "near_dir": "~/near"}}
    config = load(tmp_path, {**places, "data": {"train": "x", "cache_dir": "~/cache"}})
    assert (config.run.dir, config.checkpoint_url) == ("/home/me/runs/./a", "/home/me/commits")
    assert (config.checkpoint.near_dir, config.data.cache_dir) == ("/home/me/near", "/home/me/cache")
    assert load(tmp_path, GOOD, arguments=["--checkpoint.url", "s3://~/x"]).checkpoint_url == "s3://~/x"


def test_identity_fixes_the_order_and_leaves_the_rest_free(tmp_path):
    """Another seed is another run; another folder, rate or horizon is not."""
    base = load(tmp_path, GOOD).identity()
    assert load(tmp_path, GOOD, arguments=("--run.seed", "2")).identity() != base
    assert load(tmp_path, GOOD, arguments=("--batch.micro-batch", "4")).identity() != base
    assert (
        load(tmp_path, GOOD, arguments=("--run.dir", "x", "--epochs", "2", "--optimizer.lr", "0.1")).identity() == base
    )


def test_every_key_is_explained():
    """`elastic-train keys` has a meaning for each key."""
    rows = list(configuration.keys())
    assert len(rows) > 30
    assert [key for key, _, _, meaning in rows if not meaning and "." in key] == []


def test_an_unreadable_file_is_a_config_error(tmp_path):
    """A missing file, invalid YAML and invalid UTF-8 are configuration errors."""
    with pytest.raises(ConfigError, match=rf"none.yaml: cannot be read: No such file .*in {tmp_path}; .*init text"):
        sources.load(tmp_path / "none.yaml", environ={})
    (tmp_path / "config.yaml").write_text("")
    for name, said in (
        ("", rf"Is a directory; name a file in it, such as {tmp_path}/config.yaml"),
        ("conifg.yaml", "did you mean config.yaml"),
        ("x.yaml", "there are config.yaml"),
    ):
        with pytest.raises(ConfigError, match=said):
            sources.load(tmp_path / name, environ={})
    (tmp_path / "bad.yaml").write_text("a: [1")
    with pytest.raises(ConfigError, match=r"not valid YAML.*\n  in bad.yaml, line .*\n    a: \[1\n"):  # which is shown
        sources.load(tmp_path / "bad.yaml", environ={})
    (tmp_path / "latin.yaml").write_bytes("run:\n  name: naïve\n".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"latin\.yaml:2: not valid UTF-8"):
        sources.load(tmp_path / "latin.yaml", environ={})


def test_what_to_keep_is_read_and_checked(tmp_path: Path) -> None:
    """A size has a unit, a number of commits has none, and an invalid keep_best is refused with what to write."""
    keep = {"keep_last": "200GB", "keep_best": "max macro_f1"}
    config = load(tmp_path, {**GOOD, "checkpoint": keep})
    assert config.checkpoint.budget == 200 * 10**9
    assert load(tmp_path, yaml.safe_load(config.to_yaml())) == config
    assert load(tmp_path, {**GOOD, "checkpoint": {"keep_last": 7}}).checkpoint.budget is None
    for text in ("7", "7.0", "7."):
        with pytest.raises(ConfigError, match="a size has a unit"):
            load(tmp_path, {**GOOD, "checkpoint": {"keep_last": text}})
    for kept in (0, -1, "0GB", "0.0001B"):
        with pytest.raises(ConfigError, match=rf"'checkpoint\.keep_last': must be at least 1, given {kept!r}"):
            load(tmp_path, {**GOOD, "checkpoint": {"keep_last": kept}})
    with pytest.raises(ConfigError, match="write 'min loss'"):
        load(tmp_path, GOOD, arguments=("--checkpoint.keep-best", "loss"))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("peer_timeout_s", 1e10, "less than or equal to 1000000000"),  # ranks waited for each other, without an end
        ("threads_per_rank", 10**11, "less than or equal to 4096"),  # an OverflowError of torch's
        ("batch.global_batch", 4, "the nearest are 8 and 16"),
    ],
)
def test_numbers_with_which_nothing_can_run_are_refused(tmp_path: Path, key: str, value: float, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, GOOD, arguments=(f"--{key}={value:.0f}",))


@pytest.mark.parametrize("recompute", ["none", "selective", "units"])
def test_compiled_blocks_are_recomputed_whole_or_not_at_all(tmp_path: Path, recompute: str) -> None:
    """Selecting operations needs them separate, and a compiled block is one."""
    tree = {**GOOD, "compile": True, "parallel": {"recompute": recompute}}
    refusal = pytest.raises(ConfigError, match=r"compile.*selective|selective.*compile")
    with refusal if recompute == "selective" else contextlib.nullcontext():
        assert load(tmp_path, tree).parallel.recompute == recompute


TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=30)
TYPED = ["runs/trial #1", "&a b", "*x", "!tag", "- a", "a: b", "'q'", ' "q" ', "~", "yes", "010", "1e3", "{}", "[]"]


@pytest.mark.heavy
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=40)
@given(text=TEXT)
def test_any_text_is_taken_to_the_letter(tmp_path: Path, text: str) -> None:
    """From command line, environment and program, and through the file that other processes read."""
    take_to_the_letter(tmp_path, text)


@pytest.mark.parametrize("text", [*TYPED, "a\nb", "null"])
def test_what_looks_like_yaml_is_taken_to_the_letter(tmp_path: Path, text: str) -> None:
    """As any text; null alone clears a key that may be null."""
    take_to_the_letter(tmp_path, text)


def take_to_the_letter(folder: Path, text: str) -> None:
    path = write(folder, GOOD)
    environ = {"ELASTIC_TRAIN__TRACKING__EXPERIMENT": text}
    config = sources.load(path, environ=environ, arguments=[f"--run.name={text}"])
    assert (config.run.name, config.tracking.experiment) == (None if text == "null" else text, text)
    value = {"a": text, text: [text]}
    settings = {"tracking.experiment": text, "task.params": value, "task.params.b": text, "optimizer.options.c": text}
    config = sources.load(path, environ={}, arguments=[sources.as_argument(*each) for each in settings.items()])
    assert (config.tracking.experiment, config.task.params) == (text, {**value, "b": text})
    assert config.optimizer.options == {"c": text}
    path.write_text(config.to_yaml())
    assert sources.load(path, environ={}) == config


@pytest.mark.parametrize("text", ["a: b", "&a b", "*x", "!tag", "- a", "runs/trial #1", " x ", "2026-11-28", "é"])
def test_a_text_of_no_known_type_is_taken_to_the_letter(tmp_path: Path, text: str) -> None:
    """Such a text is no number, boolean, null, quoted text, list or mapping."""
    environ = {"ELASTIC_TRAIN__TASK__PARAMS__B": text}
    params = load(tmp_path, GOOD, environ=environ, arguments=("--task.params.a", text)).task.params
    assert params == {"a": text, "b": text}


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        *(("010", "write 10, or 0o10 for 8"), ("008", "write 8"), ("0100", "write 100"), ("1:30", "write 90")),
        *(("0b11", "write 3"), ("1_000", "write 1000"), ("+0x1F", "write 31"), ("NaN", "YAML writes .nan")),
        *(("yes", "true"), ("2026-11-28", "a number"), (".inf", "finite"), ("true", "a number"), ("'8'", "write 8")),
    ],
)
def test_what_is_no_number_of_yaml_12_is_refused(tmp_path: Path, text: str, meant: str) -> None:
    """With what was probably meant, in files, on the command line and in the environment."""
    path = tmp_path / "config.yaml"
    path.write_text(f"data: {{train: x}}\noptimizer: {{lr: {text}}}\nprofile: {{at_steps: [{text}]}}\n")
    for environ, arguments in (({}, ()), ({"ELASTIC_TRAIN__OPTIMIZER__LR": text}, ()), ({}, ("--optimizer.lr", text))):
        if environ or arguments:
            path.write_text("data: {train: x}\n")
        with pytest.raises(ConfigError) as raised:
            sources.load(path, environ=environ, arguments=arguments)
        assert meant in str(raised.value) or text == "'8'"  # which is quoted in a file alone


def test_numbers_of_yaml_12_are_read(tmp_path: Path) -> None:
    """Octal, hexadecimal, exponents, signs; a whole number may have a point."""
    texts = {"0o17": 15, "0x1F": 31, "1e3": 1000, "+1": 1, "1.0": 1}
    assert {each: load(tmp_path, GOOD, arguments=("--max-steps", each)).max_steps for each in texts} == texts
    assert load(tmp_path, GOOD, arguments=("--task.params.a", "-.inf")).task.params == {"a": -math.inf}
    for key, value in (("compile", "1"), ("compile", "yes"), ("run.seed", "9007199254740993.0")):
        with pytest.raises(ConfigError, match=key):
            load(tmp_path, GOOD, arguments=(f"--{key}", value))


@pytest.mark.parametrize("value", ["yes", "010", "1_000", "<<: {b: 1}", "&a [*a]"])
def test_what_versions_of_yaml_read_differently_is_refused_where_the_type_is_open(tmp_path: Path, value: str) -> None:
    """`no` would be true to Python, as a text that is not empty."""
    path = tmp_path / "config.yaml"
    path.write_text(f"data: {{train: x}}\ntask:\n  params:\n    {value if ':' in value else f'a: {value}'}\n")
    with pytest.raises(ConfigError, match=r"config\.yaml"):
        sources.load(path, environ={})


def test_a_text_key_of_a_file_may_look_like_a_boolean_of_yaml_11(tmp_path: Path) -> None:
    """In YAML 1.2 it is a text; keys of a mapping that are numbers stay so."""
    path = tmp_path / "config.yaml"
    path.write_text("data: {train: x}\nrun: {name: no}\ntask: {params: {labels: {0: a, 1: b}}}\n")
    config = sources.load(path, environ={})
    assert (config.run.name, config.task.params["labels"]) == ("no", {0: "a", 1: "b"})
    path.write_text(config.to_yaml())
    assert sources.load(path, environ={}) == config


PROMPT = {"adapter": {"type": "prompt_tuning", "tokenizer_name_or_path": "models/b"}}


def test_paths_are_made_absolute_at_once_and_records_keep_them_as_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task may change the working folder; a run that was begun elsewhere must be the same, and may be moved."""
    monkeypatch.chdir(tmp_path)
    written = Config.model_validate(
        {
            "run": {"dir": "runs/a"},
            "task": {"params": {**PROMPT, "hf": {"path": "models/b"}, "other": "runs/a"}},
            "data": {
                "mixture": [{"source": "a", "weight": 1}, {"source": "x/a", "weight": 1}],
                "validation": "s3://rows/v",
                "cache_dir": "cache",
            },
            "checkpoint": {"url": "file://commits", "near_dir": "~/near"},
            "tracking": {"mlflow_uri": "sqlite:///m.db?timeout=3"},
        }
    )
    found = written.anchored()
    assert found.run.dir == f"{tmp_path}/runs/a"
    adapter = {"type": "prompt_tuning", "tokenizer_name_or_path": f"{tmp_path}/models/b"}
    assert found.task.params == {"adapter": adapter, "hf": {"path": f"{tmp_path}/models/b"}, "other": "runs/a"}
    assert [(each.source, each.name) for each in found.data.mixture or ()] == [
        (f"{tmp_path}/a", "a"),
        (f"{tmp_path}/x/a", "x/a"),
    ], "what metrics call them does not change"
    assert (found.data.train, found.data.validation, found.data.cache_dir) == (None, "s3://rows/v", f"{tmp_path}/cache")
    assert found.checkpoint.url == f"file://{tmp_path}/commits"
    assert found.checkpoint.near_dir == str(Path.home() / "near")
    assert found.tracking.mlflow_uri == f"sqlite:///{tmp_path}/m.db?timeout=3"
    assert found.to_yaml() == f"# relative paths are from {tmp_path}\n{written.to_yaml()}"
    assert found.identity() == written.identity()
    assert found.anchored().as_written == pickle.loads(pickle.dumps(found)).as_written == written
    assert found.changed_since(yaml.safe_load(written.to_yaml())) == {}


def test_variables_keep_the_spelling_of_free_keys(tmp_path: Path) -> None:
    """Keys of a task of one's own may have capitals; `maxLen` arrived as `maxlen`."""
    tree = {**GOOD, "task": {"params": {"LR": 1, "inner": {"Deep": 1}}}}
    set_to = {"maxLen": "5", "LR": "2", "INNER__DEEP": "3", "INNER__NEW": "4", "inner__keptAs": "6"}
    environ = {f"ELASTIC_TRAIN__TASK__PARAMS__{name}": text for name, text in set_to.items()}
    environ["ELASTIC_TRAIN__OPTIMIZER__OPTIONS__fooBar"] = "7"
    found = load(tmp_path, tree, environ=environ)
    assert found.task.params == {"LR": 2, "inner": {"Deep": 3, "new": 4, "keptAs": 6}, "maxLen": 5}
    assert found.optimizer.options == {"fooBar": 7}


@pytest.mark.parametrize(
    ("key", "text", "is_taken"),
    [
        ("run.name", "x" * 128, True),
        ("run.name", "x" * 129, False),
        ("run.name", "Versuch ü 1/2 #3", True),
        ("tracking.experiment", "x" * 257, False),
        ("tracking.experiment", "team/project", True),
    ],
)
def test_names_are_those_that_trackers_take(tmp_path: Path, key: str, text: str, is_taken: bool) -> None:
    """A tracker refused them once the run had begun, or cut them."""
    if is_taken:
        load(tmp_path, GOOD, arguments=(f"--{key}={text}",))
    else:
        with pytest.raises(ConfigError, match=f"'{key}': must be "):
            load(tmp_path, GOOD, arguments=(f"--{key}={text}",))


def test_a_name_is_one_that_all_trackers_take(tmp_path: Path) -> None:
    tracking = {"experiment": "team/project", "wandb": "offline"}
    with pytest.raises(ConfigError, match="experiment must be 128 characters at most, without /"):
        load(tmp_path, {**GOOD, "tracking": tracking})
    old = {"wandb_project": "p", "wandb": "offline", "mlflow_uri": "mlruns"}
    with pytest.raises(ConfigError, match="experiment names the project, too: set it to 'p'"):
        load(tmp_path, {**GOOD, "tracking": old})


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("old", "key", "value", "warning"),
    [
        ({"checkpoint.interval": "auto"}, "every", "auto", "interval is now every"),
        ({"checkpoint.interval": None, "checkpoint.every_steps": 50}, "every_steps", 50, ""),
        ({"checkpoint.every_steps": 40}, "every", "40 steps, 900 s", "every_steps is now every: 'N steps'"),
        ({"checkpoint.every_s": None}, "every", "50 steps", "every_s is now every"),
        ({"checkpoint.every_steps": None, "checkpoint.every_s": None}, "every", None, "every_steps is now every"),
        ({"checkpoint.every_steps": "auto"}, "every", "auto", "every_steps is now every"),
        ({"checkpoint.every_steps": "auto", "checkpoint.every_s": 60}, "every_s", 60.0, "every_s is now every"),
        ({"validation.every_steps": 9}, "every", "9 steps", "every_steps is now every: 'N steps'"),
        ({"validation.every_steps": None}, "every", None, "every_steps is now every"),
        ({"validation.every_epochs": 2}, "every", "2 epochs", "every_epochs is now every: 'N epochs'"),
        ({"run.min_link_mb_per_s": 5.0}, "health_check", 5.0, "min_link_mb_per_s is now health_check: N"),
        ({"run.min_link_mb_per_s": None}, "min_link_mb_per_s", 0.0, "min_link_mb_per_s is now health_check: N"),
        ({"run.health_check": False, "run.min_link_mb_per_s": 5.0}, "health_check", False, "is now health_check"),
        ({"monitoring.port": 9, "monitoring.host": "::"}, "address", ("::", 9), "host is now port: HOST:PORT"),
        ({"monitoring.phases_every_steps": 7}, "address", None, "phases_every_steps is ignored"),
        ({"checkpoint.give_up_after": 3}, "every_steps", 50, "give_up_after is ignored: give_up_after, a key of the"),
        ({"checkpoint.give_up_after_s": None}, "every_steps", 50, "give_up_after_s is ignored: give_up_after, a key"),
        ({"checkpoint.when_busy": "wait"}, "every_steps", 50, "when_busy is ignored: training waits"),
        ({"data.cache_bytes": 1 << 30}, "cache_dir", None, "cache_bytes is ignored: the cache takes"),
        ({"parallel.domain": "r1"}, "copies", 2, "domain is ignored: set the environment variable"),
        ({"monitoring.otlp": "http://c:4318"}, "address", None, "otlp is ignored"),
        ({"monitoring.peak_tflops": 7.5}, "address", None, "peak_tflops is ignored: MFU is shown"),
        ({"profile.at_steps": [3], "profile.num_steps": 3}, "at_steps", (3, 4, 5), "num_steps is now at_steps"),
        ({"checkpoint.keep_every_steps": 9}, "keep_every_steps", 9, "keep_every_steps is now keep_every"),
        (
            {"checkpoint.keep_every_steps": 9, "checkpoint.keep_every_s": 2.5},
            "keep_every",
            "9 steps, 2.5 s",
            "now keep_every",
        ),
        ({"run.history_bytes": 1 << 20}, "dir", "runs/default", "history_bytes is ignored"),
        ({"run.history_terms": None}, "dir", "runs/default", "history_terms is ignored"),
        (
            {"parallel.schedule": "interleaved", "parallel.virtual_stages": 3},
            "schedule",
            "interleaved:3",
            "is now parallel.sch",
        ),
        ({"parallel.schedule": "interleaved", "parallel.virtual_stages": 2}, "virtual_stages", 2, ""),
        ({"parallel.schedule": "1f1b", "parallel.virtual_stages": 3}, "virtual_stages", 1, "is now parallel.schedule"),
        ({"data.unreadable": "quarantine"}, "quarantine", ("unreadable",), "unreadable is now quarantine"),
        (
            {"data.unreadable": "quarantine", "data.deadly": "quarantine"},
            "quarantine",
            ("unreadable", "deadly"),
            "deadly is now quarantine",
        ),
        ({"checkpoint.every_steps": "auto", "checkpoint.rpo_s": 60}, "every_s", 60.0, "rpo_s is now every"),
        ({"checkpoint.every_steps": 5, "checkpoint.rpo_s": 60}, "every_s", 900.0, "rpo_s is now every"),
        ({"checkpoint.storage_budget": "4kB"}, "budget", 4000, "storage_budget is now keep_last"),
        ({"monitoring.flops_per_sample": 1e9}, "address", None, "flops_per_sample is ignored"),
        ({"tracking.wandb_project": "p", "tracking.wandb": "offline"}, "experiment", "p", "wandb_project is now exp"),
        ({"tracking.wandb_project": "p"}, "experiment", "elastic-train", "wandb_project is now experiment"),
        ({"optimizer.nonfinite_limit": 3}, "on_nonfinite", "fail", "nonfinite_limit is ignored"),
        (
            {"optimizer.schedule": "wsd", "optimizer.cooldown_share": 0.1},
            "schedule",
            "wsd:0.1",
            "cooldown_share is now schedule",
        ),
        ({"optimizer.cooldown_share": 0.1}, "schedule", "cosine", "cooldown_share is now schedule"),
        ({"optimizer.ema": {"decay": 0.9}}, "ema_decay", 0.9, "ema is now ema_decay"),
        ({"optimizer.betas": [0.9, 0.95]}, "options", {"betas": [0.9, 0.95]}, "betas is now options"),
        ({"optimizer.name": "sgd", "optimizer.betas": [0.9, 0.95]}, "options", {}, "betas is now options"),
        ({"optimizer.ema": {}}, "ema_decay", 0.999, "ema is now ema_decay"),
    ],
)
def test_old_keys_are_taken_with_a_warning_that_names_the_new_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch,
    old: dict[str, object], key: str, value: object, warning: str,
) -> None:  # fmt: skip
    """From a file, as runs have recorded them, and from the command line; a default is no news."""
    monkeypatch.setattr(section, "_warned", set())
    tree: dict[str, dict[str, object]] = {"data": {"train": "rows"}}
    for name, was in old.items():
        tree.setdefault(name.split(".")[0], {})[name.split(".")[1]] = was
    arguments = [part for name, was in old.items() for part in (f"--{name}", "null" if was is None else str(was))]
    for config in (load(tmp_path, tree), load(tmp_path, GOOD, arguments=arguments)):
        assert getattr(getattr(config, next(iter(old)).split(".")[0]), key) == value
    obsolete = [name for name in old if nearest_key(name) != name]
    assert len(caplog.records) == (len(obsolete) if warning else 0)
    assert warning in caplog.text
    assert not set(yaml12.parse(config.to_yaml())["checkpoint"]) & set(CheckpointConfig.OLD)  # type: ignore[index, call-overload]


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"checkpoint": {"every": 100, "every_s": 60.0}}, r"'checkpoint\.every': has no unit"),
        ({"validation": {"every": 100, "every_epochs": 2}}, r"'validation\.every': has no unit"),
        ({"give_up_after": 30, "give_up_after_s": 600.0}, "'give_up_after': has no unit"),
        ({"profile": {"at_steps": 5, "num_steps": 3}}, r"'profile\.at_steps' takes a list"),
        (
            {"profile": {"at_steps": ["10"], "num_steps": 3}},
            r"'profile\.at_steps': must be a number",
        ),
        ({"optimizer": {"options": 5, "betas": [0.8, 0.9]}}, r"'optimizer\.options' is a section"),
    ],
)
def test_a_wrong_value_beside_an_old_key_is_refused_by_name(keys: dict[str, object], said: str, tmp_path: Path) -> None:
    """What says the same today is made of both."""
    with pytest.raises(ConfigError, match=said):
        load(tmp_path, {**GOOD, **keys})


@pytest.mark.parametrize("text", ["10", "steps", "0 steps", "1.5 steps", "3 weeks", "1 h, 2 h", "9 steps, 8 steps", ""])
def test_a_period_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="keep_every"):
        load(tmp_path, {**GOOD, "checkpoint": {"keep_every": text}})


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("validation.every", 100, "has no unit: write '100 steps', '2 epochs'"),
        ("validation.every", "15 min", "'15 min' is not a period: write '100 steps', '2 epochs', or null"),
        ("validation.every", "9 steps, 1 epoch", "is two periods"),
        ("checkpoint.every", 0.5, "has no unit: write '100 steps', '15 min'"),
        ("checkpoint.every", "never", "'100 steps, 15 min', auto, 'auto, 1 h', or null (only at the end)"),
        ("checkpoint.keep_every", "auto", "'10000 steps, 1 day', or null"),
        ("checkpoint.every", "auto, 9 steps", "write auto, or 'auto, 1 h'"),
        ("checkpoint.every", "2 epochs", "is not a period"),
        ("checkpoint.every", f"{10**400} steps", "is not a period"),
        ("checkpoint.every", f"{10**305} days", "is not a period"),
        ("give_up_after", "1 h", "has no number of worlds"),
        ("monitoring.port", "0.0.0.0", "must be a port"),
        ("monitoring.port", 70000, "must be a port"),
        ("run.health_check", -1, "greater than or equal to 0"),
    ],
)
def test_a_number_without_its_unit_is_refused(tmp_path: Path, key: str, value: object, problem: str) -> None:
    first, _, last = key.partition(".")
    with pytest.raises(ConfigError, match=re.escape(problem)):
        load(tmp_path, {**GOOD, first: {last: value} if last else value})


def test_the_patience_with_worlds_is_one_key(tmp_path: Path) -> None:
    """The two old keys are still read, one of them over a file that has the new one as well."""
    new = load(tmp_path, {**GOOD, "give_up_after": "3 worlds, 1 min"})
    assert (new.give_up_after_worlds, new.give_up_after_s) == (3, 60.0)
    both = load(tmp_path, {**GOOD, "give_up_after_worlds": 5, "give_up_after_s": 7})
    assert (both.give_up_after_worlds, both.give_up_after_s) == (5, 7.0)
    over = load(tmp_path, {**GOOD, "give_up_after": "3 worlds, 1 min"}, arguments=("--give_up_after_worlds", "4"))
    assert (over.give_up_after_worlds, over.give_up_after_s) == (4, 60.0)
    assert load(tmp_path, {**GOOD, "give_up_after_worlds": None}).give_up_after_worlds is None
    assert load(tmp_path, GOOD).give_up_after_s == 1800.0


@pytest.mark.parametrize("wrong", ["x", [1], {"a": 1}, 1.5])
@pytest.mark.parametrize("kind", [CheckpointConfig, ValidationConfig, MonitoringConfig], ids=lambda one: one.__name__)
def test_an_old_key_with_a_wrong_value_is_refused_by_its_name(kind: type[section.Section], wrong: object) -> None:
    """No conversion to the new key sees a value that is not of the old key's type."""
    for name, old in kind.OLD.items():
        try:
            TypeAdapter(old.kind).validate_python(wrong)
        except ValidationError:
            with pytest.raises(ValidationError, match=f"{name} {re.escape(old.why)}, and its value is wrong"):
                kind.model_validate({name: wrong})


def test_an_old_key_counts_over_the_new_one_of_a_file(tmp_path: Path) -> None:
    tree = {**GOOD, "checkpoint": {"every": "20 steps, 1 h"}, "validation": {"every": "7 steps"}}
    found = load(tmp_path, tree, arguments=("--checkpoint.every_steps", "5", "--validation.every_epochs", "2"))
    assert (found.checkpoint.every, found.validation.every) == ("5 steps, 3600 s", "2 epochs")


def test_periods_are_of_steps_and_of_time(tmp_path: Path) -> None:
    kept = load(tmp_path, {**GOOD, "checkpoint": {"keep_every": "10000 steps, 1.5 h"}}).checkpoint
    assert (kept.keep_every_steps, kept.keep_every_s) == (10_000, 5400.0)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("optimizer.learning_rate", "optimizer.lr"),
        ("max_grad_norm", "optimizer.clip_norm"),
        ("num_train_epochs", "epochs"),
        ("trainer.max_epochs", "epochs"),
        ("lr", "optimizer.lr"),
        ("check_val_every_n_epoch", "validation.every"),
        ("train", "data.train"),
        ("warmup", "optimizer.warmup_steps"),
        ("nonsense", None),
        ("checkpoint.interval", None),
        ("task.name", None),
    ],
)
def test_a_key_of_another_trainer_is_understood_and_nothing_far_is_guessed(theirs: str, ours: str | None) -> None:
    assert nearest_key(theirs) == ours
