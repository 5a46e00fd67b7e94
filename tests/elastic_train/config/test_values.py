"""Values of keys from a shell, the environment or a program: taken as they are, or refused by name."""

from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from elastic_train.config import sources
from elastic_train.config.section import size_of
from elastic_train.errors import ConfigError
from tests.elastic_train.config.test_config import GOOD, load, write


@pytest.mark.parametrize(("text", "meant"), [("1,000", "write 1000"), ("3,5", "write 3.5")])
def test_a_comma_is_no_part_of_a_number(tmp_path: Path, text: str, meant: str) -> None:
    """It separates thousands, or is a decimal point elsewhere: what was meant is said accordingly."""
    with pytest.raises(ConfigError, match=meant):
        load(tmp_path, GOOD, arguments=("--optimizer.lr", text))


@pytest.mark.parametrize(
    "text", ["1,5GB", "1.5.2", "2001-01-01", "1 # c", "5 G B", "\u0665GB", "0.1e", "1e3GB", "-5GB"]
)
def test_a_size_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    """pydantic would take what it can of a text, such as 1 byte, and keep that much of the run's commits."""
    with pytest.raises(ConfigError, match="storage_budget"):
        load(tmp_path, GOOD, arguments=("--checkpoint.storage-budget", text))
    with pytest.raises(ValueError, match="write 200GB"):
        size_of(text)


def test_sizes_are_read_and_given_on(tmp_path: Path) -> None:
    """As texts, numbers, and by way of a command line."""
    texts = {"200 GB": 200 * 10**9, "1.5tib": 3 << 39, "1e3": 1000, "5b": 5, "0.5M": 500_000}
    for text, size in texts.items():
        budget = load(tmp_path, GOOD, arguments=("--checkpoint.storage-budget", text)).checkpoint.storage_budget
        again = sources.as_argument("checkpoint.storage_budget", budget)
        assert load(tmp_path, GOOD, arguments=(again,)).checkpoint.storage_budget == budget == size


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        *((b"5", "bytes"), (Decimal(5), "Decimal"), (Fraction(5), "Fraction"), (np.bool_(True), "numpy.bool")),
        *(({5}, "set"), (np.array([5]), r"numpy.ndarray.*\.tolist\(\)"), (object(), "object"), ({(1, 2): 3}, "tuple")),
    ],
)
def test_a_value_of_a_program_that_no_file_holds_is_refused_by_name(tmp_path: Path, value: object, kind: str) -> None:
    """It would be another one in the file that a resume or another node reads."""
    path = write(tmp_path, GOOD)
    for key in ("run.seed", "task.params.a.b", "optimizer.options.c"):
        with pytest.raises(ConfigError, match=rf"{key.rpartition('.')[2]}.*{kind}"):
            sources.load(path, environ={}, overrides={key: value})


def test_numbers_of_numpy_are_those_of_python(tmp_path: Path) -> None:
    """Without a change of their value."""
    overrides = {"run.seed": np.int64(5), "optimizer.lr": np.float32(0.1), "task.params.a": [np.uint8(3), Path("b")]}
    config = sources.load(write(tmp_path, GOOD), environ={}, overrides=overrides)
    assert (config.run.seed, config.optimizer.lr) == (5, float(np.float32(0.1)))
    assert config.task.params == {"a": [3, "b"]}
    assert [type(each) for each in config.task.params["a"]] == [int, str]  # type: ignore[attr-defined]


def test_an_empty_text_is_no_section_list_or_mapping(tmp_path: Path) -> None:
    """It is what a shell makes of a variable that is not set, and would clear the key."""
    for key in ("optimizer.ema", "data.mixture", "task.params", "profile.at_steps"):
        with pytest.raises(ConfigError, match=f"{key}': is empty"):
            load(tmp_path, GOOD, arguments=(f"--{key}=",))


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (("ELASTIC_TRAIN_RUN__SEED",), "sets nothing; write ELASTIC_TRAIN__RUN__SEED"),
        (("elastic_train__run__seed",), "sets nothing; write ELASTIC_TRAIN__RUN__SEED"),
        (("ELASTIC_TRAIN_BATCH_MICRO_BATCH",), "sets nothing; write ELASTIC_TRAIN__BATCH__MICRO_BATCH"),
        (("ELASTICTRAIN__RUN__SED",), "sets nothing"),
        (("ELASITC_TRAIN__RUN__SEED",), "sets nothing"),
        (("ELASTIC_TRAIN_TASK_PARAMS_DIM",), "sets nothing"),
        (("ELASTIC_TRAIN__RUN__SEED", "ELASTIC_TRAIN__run__seed"), "unset one of them"),
    ],
)
def test_a_misspelt_variable_is_refused(tmp_path: Path, names: tuple[str, ...], said: str) -> None:
    """So is a key that two variables set."""
    with pytest.raises(ConfigError, match=said):
        load(tmp_path, GOOD, environ=dict.fromkeys(names, "3"))


def test_variables_of_others_are_left_alone(tmp_path: Path) -> None:
    """Such as those by which Kubernetes tells pods of a service named elastic-train."""
    names = ("ELASTIC_TRAIN_SERVICE_HOST", "ELASTIC_TRAIN_PORT_2379_TCP", "ELASTICSEARCH__URL", "AIRFLOW__CORE__X")
    assert load(tmp_path, GOOD, environ=dict.fromkeys(names, "3")).run.seed == 1
