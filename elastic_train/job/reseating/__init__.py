"""Seats in a new world: what every rank brings, what becomes of a pending step, who holds what from then on."""

from elastic_train.job.reseating.brought import Brought, bring, leave_out_unfinished
from elastic_train.job.reseating.columns import reseat_columns, take_first_columns
from elastic_train.job.reseating.taking import is_first, reseat, roll_forward, take_first_seats

__all__ = [
    "Brought",
    "bring",
    "is_first",
    "leave_out_unfinished",
    "reseat",
    "reseat_columns",
    "roll_forward",
    "take_first_columns",
    "take_first_seats",
]
