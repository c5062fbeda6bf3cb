"""Values in files, for the tiers on a file system (`disk/`, `fs.py`)."""
