"""`fedexp report`: run folders as one page that works offline, and as static figures."""
