"""The app is Flower's to import, in processes of its own."""

collect_ignore = ["app"]
