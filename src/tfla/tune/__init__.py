"""`tfla tune`: the kernel and chunk size for a shape, predicted, measured where that matters, kept for later calls."""
