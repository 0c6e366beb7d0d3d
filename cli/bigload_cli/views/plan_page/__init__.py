"""A plan as one page for a browser."""
