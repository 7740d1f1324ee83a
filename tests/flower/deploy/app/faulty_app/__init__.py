"""A federation of three, and clients that misbehave when configured to."""
