"""Other nodes as a tier: their chunks, found without asking."""
