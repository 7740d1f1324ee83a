"""A small federation, and clients that misbehave when configured to."""
