"""Where weights go: from names, sizes and a memory budget to a plan. Pure data in, pure data out; needs no torch."""
