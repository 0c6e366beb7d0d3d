"""Placement of units on devices: the problem, its policies, and proofs of optimality."""
