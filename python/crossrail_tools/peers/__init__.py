"""Other libraries doing the work of `crossrail bench ep`: one rank each, which the command starts and measures against.

They ship with the package and not with the repository's benches because they use private parts of the native module
and the reference of the same version. Nothing else in the package imports them: MPI and PyTorch are needed only here.
"""
