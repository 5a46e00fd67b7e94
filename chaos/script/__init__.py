"""Scripts of others: any torchrun command as a job to break, watched from outside, judged by what its hook logs."""
