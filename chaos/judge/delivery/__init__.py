"""Check a run's claims about its delivery against its records and an independent computation."""
