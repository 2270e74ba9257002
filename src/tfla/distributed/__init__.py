"""Several GPUs, on PyTorch's own distributed engine (docs/distributed.md)."""
