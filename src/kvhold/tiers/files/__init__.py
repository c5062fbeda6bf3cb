"""Values in files, for the tiers on a file system (`disk/`, `fs.py`).

- `transfer.py`: moves bytes between memory and a file
- `tree.py`: one folder of ours
- `threads.py`: threads for blocking file work
- `opener.py`: opens a place once for many calls
- `names.py`: temporary names
- `safe.py`: opens only folders and files that other users cannot change
- `faults.py`: turns an OSError into a TierError
"""
