"""`python -m laconic`, which is what torchrun starts."""

from laconic.cli.main import main

main()
