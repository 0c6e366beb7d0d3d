"""Tensor-parallel plans of a model in memory: inference, validation and application."""
