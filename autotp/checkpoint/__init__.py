"""Disk to the tensors of one rank, and back."""
