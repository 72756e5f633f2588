"""Finds the rules of ops without a row in rules/ by running them on shards."""
