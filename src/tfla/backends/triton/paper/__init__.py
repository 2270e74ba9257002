"""The kernels of the paper's algorithm, which are quadratic inside a chunk: `kernel="tfla"`."""
