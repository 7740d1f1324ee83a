"""Published data sets: one module each, and how their files are fetched, read and cached."""
