"""Worker processes that run one model together: start, requests, caches, shutdown."""
