"""The writing side of a reshard: windows, output files, staging folder, journal, resume."""
