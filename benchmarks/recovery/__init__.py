"""What a fault costs: from it to the next applied step, and in throughput, beside stock torchrun."""
