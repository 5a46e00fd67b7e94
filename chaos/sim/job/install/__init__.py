"""Install the simulated world under the product: tables of replaced names, module by module, and the stand-ins.

The product's modules keep their code. During a simulation, the names through which they reach the machine (clock,
threads, sockets, etcd's client, storage, process groups, tensors) refer to simulated ones. Everything not in these
tables is the code that ships.
"""
