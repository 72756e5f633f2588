"""How a record is printed."""
