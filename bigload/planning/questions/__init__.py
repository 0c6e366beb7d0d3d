"""Questions about plans: why, what else, how much memory, how long a context."""
