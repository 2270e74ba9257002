"""The parts that the Triton and Hopper kernels share: configurations, segments, gate kernels, recorded launches."""
