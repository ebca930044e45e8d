"""These kernels under the names by which other packages choose an attention."""
