"""Nodes forked from one process that has done their imports.

A node started as a program imports torch and the trainer for seconds of a core, most of a short scenario on a small
machine. A forked node behaves the same: its own session, environment, log, standby process and workers, all with its
mark.
"""
