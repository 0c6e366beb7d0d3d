"""Memory budgets: limit specifications, files of limits, and limits detected on this machine."""
