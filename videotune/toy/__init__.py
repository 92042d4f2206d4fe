"""The toy: draw clips of one moving shape, and detect what such a clip shows."""
