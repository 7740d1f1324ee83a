"""The paper's claims as property tests, by their numbers P1 to P18 in docs/paper.md#theory."""
