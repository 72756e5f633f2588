"""A torch.nn.Module goes in, one FX graph with guards comes out. Nothing here knows of ranks."""
