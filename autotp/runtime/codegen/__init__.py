"""Graphs as Python code that runs, and that people read."""
