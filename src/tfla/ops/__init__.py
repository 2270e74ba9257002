"""The operator: its public functions, their checks, and the choice of a backend."""
