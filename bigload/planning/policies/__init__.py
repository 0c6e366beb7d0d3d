"""One file per way to place units on devices; `registry.py` names them."""
