"""Rules of membership: pure functions of a view, without I/O and without a clock."""
