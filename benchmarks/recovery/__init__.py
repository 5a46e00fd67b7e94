"""The cost of a fault: time to the next applied step, and throughput, compared with stock torchrun."""
