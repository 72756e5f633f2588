"""The cost of collectives, of conversions between placements, and of training state."""
