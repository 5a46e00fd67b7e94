"""Every error of this package, in one tree.

RendezvousError
├── OptionError               --rdzv_conf, the endpoint or the run id cannot be used as given; all problems at once
│   └── LimitsDifferError     --nnodes, or the mode of recovery, is not that of the nodes that run already
├── StoreError
│   ├── StoreUnavailableError etcd did not do it within the deadline, retries included, and may do it later
│   │   ├── StoreBlockedError an alarm (NOSPACE, CORRUPT) keeps etcd from writing until its operator clears it
│   │   └── StoreDeniedError  user, password or permissions are not right; a mistake if etcd has never let us in
│   └── StoreRefusedError     etcd answered, and would refuse the same again: a lease that has ended, a size
├── NewerVersionError         a newer version of this package has written what this one cannot read
├── FencedError               a newer world exists; this one may neither claim a term nor publish
├── TooFewNodesError          fewer than min_nodes joined in time
├── StoppedWaiting            asked to leave before a world was formed
└── ServerError               the etcd of a demo or a test could not be started

A message says what happened, where (endpoint, key, term), and what to do.
"""

from __future__ import annotations


class RendezvousError(Exception):
    """Base class of errors for the user."""


class OptionError(RendezvousError):
    """One or more options are wrong; `problems` has all of them."""

    def __init__(self, *problems: str) -> None:
        self.problems = problems
        super().__init__("\n".join(problems))


class LimitsDifferError(OptionError):
    """This node has another --nnodes, or another mode of recovery, than the running ones."""


class StoreError(RendezvousError):
    """The control plane could not carry out a request."""


class StoreUnavailableError(StoreError):
    """Etcd did not answer in time; a write may or may not have happened. Callers wait and retry."""


class StoreBlockedError(StoreUnavailableError):
    """An alarm keeps etcd from writing; reads, renewals and running worlds continue."""


class StoreDeniedError(StoreUnavailableError):
    """Etcd rejects the user, or denies permission."""


class StoreRefusedError(StoreError):
    """Etcd answered, and would refuse the same request again."""


class NewerVersionError(RendezvousError):
    """A newer version of this package has written a world, head or end in a format that this version cannot read."""


class FencedError(RendezvousError):
    """A newer world exists; this one must stop and must not publish."""


class TooFewNodesError(RendezvousError):
    """Fewer nodes than `min_nodes` joined in time."""


class StoppedWaiting(RendezvousError):  # noqa: N818 - not a failure
    """A member was asked to leave while it waited for a world."""


class ServerError(RendezvousError):
    """The etcd of a demo or a test could not be started."""
