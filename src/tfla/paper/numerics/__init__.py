"""How far results are from float64, forward and every gradient, beside what rounding to a dtype alone costs."""
