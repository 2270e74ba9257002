"""The errors of the output and of all gradients against float64, beside those of rounding to a dtype alone."""
