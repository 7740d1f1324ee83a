"""The study of the relative eps: its protocol as data, its runs and its tables."""
