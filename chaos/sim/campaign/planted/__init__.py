"""Bugs planted in the running product: the judge must catch each with one of the invariants listed for it.

A simulator that has never failed has proved nothing. `chaos.planted.catalogue` plants the traces of bugs in files; here
the running code has the bug, and faults must expose it within a bounded number of seeds.
"""
