"""Marks of result files: an existing file is overwritten only if it carries the mark of the same kind."""

MADE_BY_BENCH_LOAD = "bigload bench-load"
MADE_BY_RUN = "bigload run"
