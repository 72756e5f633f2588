"""Graphs as Python code, to run and to read."""
