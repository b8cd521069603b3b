"""Reports of measurements: one JSON form, and tables that are views of it.

Nothing here measures or needs the native module: a file written on one machine can be read, tabulated and compared on
another.
"""
