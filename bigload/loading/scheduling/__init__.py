"""Schedules of byte ranges, and the arithmetic of slices, pieces and views behind them. Needs no torch."""
