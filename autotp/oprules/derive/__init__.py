"""Rules that are computed from the arguments of a call: views, slices, products, lookups."""
