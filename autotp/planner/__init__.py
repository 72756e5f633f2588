"""Graph and rules become a problem, and its solution a Plan: decides, and writes no code."""
