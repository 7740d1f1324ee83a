"""The pages of docs/algorithms: their generated blocks and figures (docs/algorithms.md)."""
