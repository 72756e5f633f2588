"""The tensor-parallel group: found, started, agreed with, and reported when a rank is lost."""
