"""`kvhold bench quality`: the cost of lossy codecs in answers."""
