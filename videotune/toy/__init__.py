"""The toy: a generator of clips of one moving shape, and the detector that says what a clip shows."""
