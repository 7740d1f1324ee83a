"""The paper's claims as property tests; the numbers P1 to P18 are those of the audit (A7)."""
