"""Functions of other packages, with their names, signatures and semantics, on the kernels of this one."""
