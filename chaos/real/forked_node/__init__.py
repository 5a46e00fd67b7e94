"""Nodes that start with their imports done: forks of one process that has done them.

A node that is started as a program imports torch and the trainer for seconds of a core, which on a small machine is
most of what a short scenario takes. What it then does, and what can be done to it, is the same: it is a process of its
own session, with its own environment, log, standby process and workers, and all of them carry its mark.
"""
