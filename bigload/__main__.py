"""Entry point of `python -m bigload`, for environments whose scripts are not on PATH."""

from importlib import import_module

if __name__ == "__main__":
    import_module("bigload_cli.app").main()  # by name: the library does not import the command line
