"""Values and contracts. It imports no other package, and reads no file but the settings."""
