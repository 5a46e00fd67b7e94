"""Predict a run's memory, step time, cost and fault losses before it starts, from the real model.

`reading` traces the model on fake tensors, without memory for it. `arithmetic` computes everything else from a
catalogue of devices and links.
"""
