"""One file per verb: parse, call the library, show."""
