"""What a run leaves on disk: its folder, checkpoints, journal and heartbeat, and the
trackers that copy it elsewhere.
"""
