"""What a collective, a change of placement and the state of training cost on a machine."""
