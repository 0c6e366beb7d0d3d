"""Functions of accelerate for processes of a group: who goes first, who saves, who waits."""
