"""Plain data that is handed to users and written to disk: Plan, Evidence, JSON."""
