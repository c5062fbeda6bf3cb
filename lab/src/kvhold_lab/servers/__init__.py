"""Real servers on free loopback ports."""
