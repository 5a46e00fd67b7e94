"""Why a run stopped, and what to do about it."""
