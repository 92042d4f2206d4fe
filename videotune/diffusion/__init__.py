"""The equations: noising paths, timestep distributions, the objective and the loss, in
torch alone.
"""
