"""What is on disk: names, dtypes, shapes and byte ranges. Reads headers only, never weights; needs no torch."""
