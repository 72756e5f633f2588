"""A Plan becomes the graph of one rank: the rewriter, every later pass, and the type check."""
