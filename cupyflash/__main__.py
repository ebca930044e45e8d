"""`python -m cupyflash`."""

from .tools.cli import main

main()
