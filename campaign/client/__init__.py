"""The instrument: a socket reader that stamps before it parses, and what it read."""
