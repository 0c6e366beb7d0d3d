"""One file per way to place units on devices; `planning/policy_registry.py` names them."""
