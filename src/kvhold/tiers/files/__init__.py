"""Values in files, for the tiers whose place is a file system (`disk/`, `fs.py`).

`transfer.py` bytes between memory and a file; `tree.py` one folder of ours; `threads.py` the threads that wait for them; `opener.py` opens
a place once for many calls; `names.py` temporary names; `faults.py` what an OSError means.
"""
