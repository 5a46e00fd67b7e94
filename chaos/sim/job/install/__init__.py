"""Puts the simulated world under the product: the tables of what is replaced, module by module, and the stand-ins.

The product's modules keep their code. While a simulation runs, the names by which they reach the machine (clock,
threads, sockets, etcd's client, storage, process groups, tensors) lead to the simulated ones. What is in no line of
these tables is what ships.
"""
