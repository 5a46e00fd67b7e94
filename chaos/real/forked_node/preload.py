"""What nodes import, and their workers; the process that they are forked from does so once."""

import torch.distributed.run  # noqa: F401

import elastic_train.preload  # noqa: F401
import rendezvous.torchelastic.entry_point
import rendezvous.torchelastic.live_agent
import rendezvous.torchelastic.restart_agent  # noqa: F401
