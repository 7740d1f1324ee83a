"""Secure aggregation: the server sees sums of updates, and no update of any one client."""
