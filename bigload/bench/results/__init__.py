"""Results of a bench: statistics, warnings, a recommendation, and the files that hold them."""
