"""Generate this repository's own documents from the runs in results/."""
