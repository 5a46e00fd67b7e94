"""Preparing a task with its training set: with one dataset, or with sources that must be read alike.

Each source has to do alone, for a task that is there for nothing else: so what is wrong names the source it is wrong
in, and what a task chooses by what it finds, such as the columns of packed documents, is the same in all of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from elastic_train.config.schema import TaskConfig
from elastic_train.data.dataset.manifest import Manifest
from elastic_train.data.dataset.row_groups import check_columns
from elastic_train.data.dataset.training_sources import Source
from elastic_train.errors import DataError
from elastic_train.tasks.task import Matching, Task, load_task


def prepare(task: Task, config: TaskConfig, manifest: Manifest, sources: Sequence[Source]) -> None:
    """Prepare the configured task with a dataset, in which the rows of `sources` are numbered, if there are any.

    Raises ConfigError or DataError if the task, the dataset or one of the sources does not fit.
    """
    columns = [_columns_alone(config, source.manifest) for source in sources]
    for source, chosen in zip(sources[1:], columns[1:], strict=True):
        _check_read_alike(source.manifest, chosen, sources[0].manifest, columns[0])
    task.prepare(manifest)
    if isinstance(task, Matching):
        for source in sources[1:]:
            task.check_held_out(source.manifest)


def _columns_alone(config: TaskConfig, manifest: Manifest) -> list[str]:
    """Return the columns that the task would read of a source if it were the training set."""
    task = load_task(config)
    task.prepare(manifest)
    check_columns(manifest, task.columns())
    return list(task.columns())


def _check_read_alike(manifest: Manifest, mine: list[str], first: Manifest, theirs: list[str]) -> None:
    """Raise DataError if the task would read other columns of a source than of the first one, or of other types."""
    if mine != theirs:
        raise DataError(
            f"{manifest.url}: the task would read its columns {', '.join(mine)}, and {', '.join(theirs)} of "
            f"{first.url}: sources of a mixture are read alike, so pack both or neither, or name the columns in "
            "task.params"
        )
    for name in mine:
        if manifest.columns[name] != first.columns[name]:
            raise DataError(
                f"{manifest.url}: column '{name}' is {manifest.columns[name]}, in {first.url} it is "
                f"{first.columns[name]}: sources of a mixture have one type for each column; write one of them again"
            )
