"""The leaderboard: its protocol as data, its runs and its tables (docs/leaderboard.md)."""
