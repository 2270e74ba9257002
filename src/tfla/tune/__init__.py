"""The implementation of `tfla tune`, which predicts and measures the fastest kernel and chunk size for a shape."""
