"""The placement problem as numbers, and its exact solution: no graph and no torch."""
