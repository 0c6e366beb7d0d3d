"""The command line of bigload. Commands parse, call the library, and hand its values to views."""
