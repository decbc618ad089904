"""``crossover-ddp run``: sibling jobs under one supervisor."""
