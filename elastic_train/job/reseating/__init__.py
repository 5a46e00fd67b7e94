"""The state in a new world: what ranks bring, what becomes of a pending step, who holds what from then on."""

from elastic_train.job.reseating.brought import Brought, bring, leave_out_unfinished
from elastic_train.job.reseating.pending_step import roll_forward
from elastic_train.job.reseating.taking import Taken, give_state, is_first, take_first_seat, take_state

__all__ = [
    "Brought",
    "Taken",
    "bring",
    "give_state",
    "is_first",
    "leave_out_unfinished",
    "roll_forward",
    "take_first_seat",
    "take_state",
]
