"""Values and contracts. Every other package may import this one; it imports no other package.

No I/O except reading a config file.
"""
