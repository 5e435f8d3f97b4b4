"""`python -m laconic`, which is what torchrun starts."""

from laconic.cli import main

main()
