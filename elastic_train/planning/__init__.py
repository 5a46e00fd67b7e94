"""What a run will need before it runs: memory, time, money and faults, worked out from the real model.

`reading` traces the model without memory for it. All else is `arithmetic`, over devices and
links that its catalogue knows.
"""
