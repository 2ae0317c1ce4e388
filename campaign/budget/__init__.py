"""The budget controller as a state machine: events in, decisions out. Pure."""
