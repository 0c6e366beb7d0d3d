"""Host and device buffers between a read and the final tensor: casts, gathers, copies to accelerators."""
