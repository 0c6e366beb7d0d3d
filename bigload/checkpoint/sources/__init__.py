"""Remote byte sources by kind of service, HTTP ranges, and the cache of small reads."""
