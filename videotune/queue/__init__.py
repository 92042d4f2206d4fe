"""Work that waits: trainings in a folder, by priority and card, and the processes that they run in."""
