"""What torch.export would lose or freeze: hooks, attributes, branches, backward functions."""
