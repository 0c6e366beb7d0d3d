"""Profiles: rates of a machine that predictions of plans go by, measured or public."""
