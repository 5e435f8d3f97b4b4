"""`python -m laconic`, the module that torchrun starts."""

from laconic.cli.main import main

main()
