"""The tests mirror src/laconic; house holds the laws, oracles the papers in loops."""
