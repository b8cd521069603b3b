"""The tools of Crossrail: the command, reports, plans, and the other libraries that benchmarks compare with.

They import the library `crossrail`; the library never imports them. `report` and `planning` need neither the library
nor its native module.
"""
