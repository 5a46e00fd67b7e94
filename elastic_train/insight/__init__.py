"""Where a run's time goes and what is wrong with it: phases of every rank, events, pages; none of it decides a bit."""
