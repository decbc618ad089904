"""Who computed and who communicated when: recording, and what is made of the records."""
