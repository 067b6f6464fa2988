"""Studies: many runs, paired over seeds and test images, one table and one verdict. `study.py` starts them."""
