"""What the script imports: workers that are started as `-m` a module are forks of a process that has it."""

import torch
import torch.distributed
import torch.nn.parallel

__all__ = ["torch"]
