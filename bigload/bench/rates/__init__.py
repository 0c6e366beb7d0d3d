"""Rates of this machine, measured for the predictions of plans."""
