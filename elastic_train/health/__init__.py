"""Whether a machine is fit to train: what it computes, keeps and writes, held against what is known beforehand.

A worker proves it before it becomes a member of a live job (`proof`), and `elastic-train doctor` whenever it is asked.
"""
