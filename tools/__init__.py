"""What developers run; never part of the installed package."""
