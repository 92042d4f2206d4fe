"""Runs on a stand-in card (``card.py``), each test in a process of its own
(``child.py``).
"""
