"""Measure loading. Running, statistics and reporting never mix; nothing here prints."""
