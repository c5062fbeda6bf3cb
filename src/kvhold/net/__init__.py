"""Communication between processes: `messages.py` has the typed records, `wire.py` cuts them from a
stream of bytes.
"""
