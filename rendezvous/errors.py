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
    """An error meant for the user."""


class OptionError(RendezvousError):
    """One or more options are wrong; all of them are in `problems`."""

    def __init__(self, *problems: str) -> None:
        self.problems = problems
        super().__init__("\n".join(problems))


class LimitsDifferError(OptionError):
    """This node was started with another --nnodes, or in another mode of recovery, than those that run."""


class StoreError(RendezvousError):
    """The control plane could not do what was asked."""


class StoreUnavailableError(StoreError):
    """Etcd did not do it in time; a write may or may not have happened. Those that need it wait."""


class StoreBlockedError(StoreUnavailableError):
    """An alarm keeps etcd from writing; reads, renewals and running worlds go on."""


class StoreDeniedError(StoreUnavailableError):
    """Etcd does not accept the user, or does not let it do this."""


class StoreRefusedError(StoreError):
    """Etcd answered, and would refuse the same again."""


class NewerVersionError(RendezvousError):
    """A newer version of this package has written a world, a head or an end in a format that this one cannot read."""


class FencedError(RendezvousError):
    """A newer world exists; this one must stop and must not publish."""


class TooFewNodesError(RendezvousError):
    """Fewer nodes than `min_nodes` joined in time."""


class StoppedWaiting(RendezvousError):  # noqa: N818 - not a failure
    """A member was asked to leave while it waited for a world."""


class ServerError(RendezvousError):
    """The etcd of a demo or a test could not be started."""
