"""Sources to packed files: pack, split, find duplicates, inspect."""
