"""Where a run's time goes and what is wrong with it: phases of every rank, events, pages; no influence on results."""
