"""Test problems, rule tables and process utilities that several test packages use."""
