"""Whether the rows of rules/ are right: each op run on shards and compared."""
