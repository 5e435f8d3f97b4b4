"""How many vectors a text or a question needs: distributions of lengths, and what trains them."""
