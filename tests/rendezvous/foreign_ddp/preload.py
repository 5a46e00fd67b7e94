"""Imports of the script: workers started with `-m` are forked from a process that has imported them."""

import torch
import torch.distributed
import torch.nn.parallel

__all__ = ["torch"]
