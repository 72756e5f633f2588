"""The tensor-parallel group: how it is found and started, checks that ranks agree, lost ranks."""
