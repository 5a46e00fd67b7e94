"""Health checks of a machine: computation, memory, disk and links, compared with known results.

A worker is checked before it becomes a member of a live job (`precheck`); `elastic-train doctor` checks on demand.
"""
