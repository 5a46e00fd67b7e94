"""The keys of what a run says of itself while it trains: phases, events, pages and traces."""

from __future__ import annotations

from pydantic import PositiveInt

from elastic_train.config.section import Section


class MonitoringConfig(Section):
    phases_every_steps: PositiveInt = 50
    """After how many steps the seconds that every rank has spent, phase by phase, go to the history and the tracker."""
