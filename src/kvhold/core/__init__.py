"""Values and contracts: what every other package may import and which imports none of them. No I/O but reading a config file."""
