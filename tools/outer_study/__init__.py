"""The study of docs/outer-optimisers.md: outer rules for a few workers that train a small GPT."""
