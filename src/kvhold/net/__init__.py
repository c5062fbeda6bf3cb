"""What travels between processes: `messages.py` the typed records, `wire.py` how they are cut from a stream of bytes."""
