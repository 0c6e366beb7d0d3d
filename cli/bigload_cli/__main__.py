"""`python -m bigload_cli`."""

from bigload_cli.app import main

main()
