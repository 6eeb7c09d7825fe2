"""Records: what the code answered before a rewrite, as files that a later commit is compared with.

A part is a module of this folder with `record() -> dict`, JSON values that are the same on every
machine, and a file of the same name, PART.json, that `python -m tests.recorded --write PART`
writes. A commit that alters a record says in its message which value, and why the new one is right.

Bits of training differ between processors, so none are kept: `python -m tests.recorded bits
--against COMMIT` compares two trees on one machine (`bits.py`).
"""
