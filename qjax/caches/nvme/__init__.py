"""The tiers on NVMe: heads that prompts begin with (disk), and whole conversations (spill), as entries of one storage.

chain.py      the keys of pages and anchors        catalog.py    what lies in the storage
filed.py      what entries' fields say            index.py      what goes first, by values.py
admission.py  which lines of a prompt are written  writer.py     staging, and the threads that write
restore.py    from files to a sequence             spill.py      sessions to files, and back at the start
disk.py       the tier                             place.py      opening the storage of an engine
"""
