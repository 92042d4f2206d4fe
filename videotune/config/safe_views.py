"""How often a window may be seen at a low learning rate; read by pages, which load no
pydantic.
"""

LOW_RATE = 4e-5
"""At or below this learning rate, up to ``SAFE_VIEWS`` views of a window should be safe."""

SAFE_VIEWS = 30
