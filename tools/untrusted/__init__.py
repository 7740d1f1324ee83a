"""The study of docs/untrusted-clients.md: attacks on server rules, and protections against them."""
