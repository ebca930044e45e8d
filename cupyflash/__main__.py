"""`python -m cupyflash`."""

from .cli import main

main()
