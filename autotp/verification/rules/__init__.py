"""Verifies the rows of rules/: runs each op on shards, and compares."""
