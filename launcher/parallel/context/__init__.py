"""Context parallelism: sequences split over ranks, with attention over all of their tokens."""
