"""Files: save, load and inspect expanded and packed models."""
