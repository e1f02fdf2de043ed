"""storage: named arrays under content keys, in files that are checked when read; knows numpy, tensorstore and bytes, and imports nothing of qjax."""
