"""The `Task` protocol, which users' own classes implement, and the tasks of the package."""

from elastic_train.tasks.task import Finishing, Grouping, LaneLoss, ParameterGroup, Task, load_task

__all__ = ["Finishing", "Grouping", "LaneLoss", "ParameterGroup", "Task", "load_task"]
