"""``oscar bench``: kernels and whole decode steps, timed beside the fastest BF16 path of the machine, checked first."""
