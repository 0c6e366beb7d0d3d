"""Files as the kernel keeps them: file systems, page cache, holes; and the folder of what bigload caches."""
