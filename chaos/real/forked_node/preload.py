"""The imports of nodes and workers, done once by the process that they are forked from."""

import torch.distributed.run  # noqa: F401

import elastic_train.preload  # noqa: F401
import rendezvous.torchelastic.entry_point
import rendezvous.torchelastic.live_agent
import rendezvous.torchelastic.restart_agent  # noqa: F401
