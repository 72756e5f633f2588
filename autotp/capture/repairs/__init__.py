"""Repairs of what torch.export loses or freezes: hooks, attributes, branches, own backwards."""
