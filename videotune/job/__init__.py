"""What a run is to do: the config with its origins, the clips it trains on, and the
schedule over them.
"""
