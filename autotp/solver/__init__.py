"""The placement problem as numbers, solved exactly: no graph and no torch."""
