"""Long runs: damage by the hundred thousand, kills by the thousand, a server that keeps dying under an engine. Short ones run in CI."""
