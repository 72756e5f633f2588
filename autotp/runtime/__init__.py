"""What exists while a rank runs: the sharded model and the variants that answer its calls."""
