"""What is in memory by now is not looked through by the garbage collector again.

The server of ``fork_server`` imports this last: a fork of it collects garbage, which
among a million objects of libraries takes as long as the run itself, and would copy
each page on which one of them lies.
"""

import gc

gc.collect()
gc.freeze()
