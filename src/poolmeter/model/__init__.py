"""Frozen nouns shared by every component: no I/O, standard library only."""
