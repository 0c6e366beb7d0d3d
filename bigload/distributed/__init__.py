"""Process groups: launchers, barriers, who goes first, liveness of peers. torch is imported only where ranks meet."""
