"""Files of a run that are written by the call itself, for tests of what is in them."""

from __future__ import annotations

from elastic_train.tracking.background_files import Act, BackgroundFiles


class Unqueued(BackgroundFiles):
    """Does at once what a thread would do soon."""

    def put(self, act: Act) -> None:
        act()
