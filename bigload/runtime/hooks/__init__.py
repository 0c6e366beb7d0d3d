"""Hooks around module forwards that bring weights and arguments to a device."""
