"""Claims about what a run delivers, held against its records and a computation made here."""
