"""Block masks: patterns, blocks and their bits, and the lists that kernels walk by."""
