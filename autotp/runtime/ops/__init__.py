"""The ops of `torch.ops.autotp`: one for each change of placement, with its backward."""
