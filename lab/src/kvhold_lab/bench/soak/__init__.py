"""Long runs: damage, kills, a dying server, random requests."""
