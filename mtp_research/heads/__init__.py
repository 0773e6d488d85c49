"""MTP modules: their layers, the stack of them, and their files."""
