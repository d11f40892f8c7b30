"""Importing this module exempts all objects so far from garbage collection.

Some hundred thousand objects of imported packages make each ``gc.collect`` of a run take a third of a second.
"""

import gc

gc.collect()
gc.freeze()
