"""Planning of where weights go, from names, sizes and a memory budget. Pure data in and out; needs no torch."""
