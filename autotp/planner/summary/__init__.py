"""A solution written down as a Plan: layouts, shards, collectives, memory and reasons."""
