"""The model as a planner sees it: module tree, units, ties, experts, caches, activations."""
