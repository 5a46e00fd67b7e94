"""Resharding in a new world: gather the ranks' states, settle a pending step, and assign shards."""

from elastic_train.job.resharding.peer_states import PeerState, gather_peer_states, leave_out_unfinished
from elastic_train.job.resharding.pending_step import roll_forward
from elastic_train.job.resharding.reshard import Taken, give_state, is_first, take_first_seat, take_state

__all__ = [
    "PeerState",
    "Taken",
    "gather_peer_states",
    "give_state",
    "is_first",
    "leave_out_unfinished",
    "roll_forward",
    "take_first_seat",
    "take_state",
]
