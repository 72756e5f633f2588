"""Rules of ops that have none in rules/, found by running the op on shards."""
