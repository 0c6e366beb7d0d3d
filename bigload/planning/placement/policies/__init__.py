"""One file per way to place units on devices; `policy.py` names them, `registry.py` finds them."""
