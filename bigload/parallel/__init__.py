"""Many processes that do one thing: which of them is this, who does what first or alone, and who gets which part."""
