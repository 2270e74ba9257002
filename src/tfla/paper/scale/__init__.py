"""A model of the cost of training on many GPUs: the time of a step and the memory of a GPU, by layout."""
