"""The queue of trainings, ordered by priority and GPU, and the processes that run them."""
