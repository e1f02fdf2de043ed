"""The tiers on NVMe: heads that prompts begin with (disk), and whole conversations (spill), as entries of one storage.

chain.py      the keys of pages and anchors         catalog.py    what lies in the storage
filed.py      what entries' fields say              index.py      what goes first, by values.py
admission.py  which lines of a prompt are written   room.py       budgets and free space, and what makes way
backlog.py    heads that wait for staging.py        writer.py     what is staged, and the threads that write
restore.py    from files to a sequence, by head.py  spill.py      sessions to files, and back at the start
disk.py       the tier                              place.py      opening the storage of an engine
"""
