"""Bugs planted in the product's code while it is simulated: each must be caught by the invariant named beside it.

A simulator that has never failed has proved nothing. `chaos.planted.catalogue` plants what bugs leave in files; here
the bug itself is in the running code, and the faults have to bring it to light within a bounded number of seeds.
"""
