"""What is trained: the `Task` protocol that a user's own class satisfies, and the tasks that come with the package."""

from elastic_train.tasks.task import Finishing, Grouping, LaneLoss, ParameterGroup, Task, load_task

__all__ = ["Finishing", "Grouping", "LaneLoss", "ParameterGroup", "Task", "load_task"]
