"""Commands about a run that its files answer: whether it is done, what happened, how runs differ, what it does now."""
