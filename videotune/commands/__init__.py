"""One file a command: a function that composes the packages below and returns a result.

``videotune.cli`` prints the results. It imports a command inside the function that runs
it, since ``--help`` must not load torch.
"""
